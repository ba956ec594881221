// The gateway's endpoints: errors in words, server-sent events, and the key, which never leaves this tab.

const STORED_AS = "octavo-key";

export function readKey() {
  return sessionStorage.getItem(STORED_AS) ?? "";
}

export function keepKey(key) {
  if (key) sessionStorage.setItem(STORED_AS, key);
  else sessionStorage.removeItem(STORED_AS);
}

/** `status` is null where no answer came. */
export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** A response that is not an error. Throws ApiError, or AbortError when `options.signal` says so. */
export async function request(path, options = {}) {
  const headers = { ...options.headers };
  const key = readKey();
  if (key) headers.Authorization = `Bearer ${key}`;
  let response;
  try {
    response = await fetch(path, { ...options, headers, credentials: "same-origin" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(null, "the gateway does not answer");
  }
  if (!response.ok) throw new ApiError(response.status, await messageOf(response));
  return response;
}

async function messageOf(response) {
  const text = await response.text().catch(() => "");
  try {
    const { error, detail } = JSON.parse(text);
    const message = error?.message ?? error ?? detail;
    if (typeof message === "string") return message;
  } catch {
    // Not ours: a proxy's page, perhaps.
  }
  return `the answer was HTTP status ${response.status}`;
}

/** The data of each server-sent event. Throws ApiError when the connection breaks. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let pending = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      pending += value;
      const lines = pending.split(/\r?\n/);
      pending = lines.pop();
      for (const line of lines) {
        if (line.startsWith("data:")) yield line.slice(5).trimStart();
      }
    }
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(null, "the connection to the gateway broke");
  } finally {
    reader.cancel().catch(() => {});
  }
}
