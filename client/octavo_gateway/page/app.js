// Wires the page: the gateway's endpoints to the chat and the engine's panel, and keys and buttons to both.

import { events, keepKey, readKey, request } from "./api.js";
import { explain } from "./advice.js";
import { Chat } from "./chat.js";
import { EnginePanel } from "./engine.js";

const RETRY_FIRST_MS = 1000;
const RETRY_MOST_MS = 10000;

const find = (id) => document.getElementById(id);
const prompt = find("prompt");
const modelChoice = find("model");

// --- the key ---

let asked = null; // one question at a time, whoever needs the answer

function askForKey(reason) {
  asked ??= new Promise((resolve) => {
    const dialog = find("ask-key");
    find("ask-key-reason").textContent = reason;
    find("key").value = "";
    dialog.returnValue = "";
    dialog.addEventListener(
      "close",
      () => {
        const key = dialog.returnValue === "use" ? find("key").value.trim() : "";
        if (key) keepKey(key);
        asked = null;
        resolve(key !== "");
      },
      { once: true },
    );
    dialog.showModal();
  });
  return asked;
}

/** As `request`; where the gateway wants a key it asks for one, until it fits or nobody wants to give one. */
async function requestWithKey(path, options) {
  for (;;) {
    const tried = readKey();
    try {
      return await request(path, options);
    } catch (error) {
      if (error.status !== 401) throw error;
      if (readKey() !== tried) continue; // somebody else has asked in the meantime
      keepKey("");
      if (!(await askForKey(tried ? "That key does not fit. Try another one." : ""))) throw error;
    }
  }
}

for (const [id, value] of [["ask-key", "use"], ["settings", "done"]]) {
  find(id).querySelector("form").addEventListener("submit", (event) => {
    event.preventDefault();
    find(id).close(value);
  });
}
find("no-key").addEventListener("click", () => find("ask-key").close());

// --- the chat ---

const chat = new Chat({
  list: find("messages"),
  welcome: find("welcome"),
  announcer: find("announcer"),
  settings: () => ({
    model: modelChoice.value,
    temperature: find("temperature").valueAsNumber,
    maxTokens: find("max-tokens").valueAsNumber || 512,
    system: find("system").value.trim(),
  }),
  post: (body, signal) =>
    requestWithKey("v1/chat/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(body),
      signal,
    }),
  onState(busy) {
    const hadFocus = [find("send"), find("stop")].includes(document.activeElement);
    find("send").hidden = busy;
    find("stop").hidden = !busy;
    if (hadFocus) (busy ? find("stop") : prompt).focus();
  },
});

function send(text) {
  if (!text.trim() || chat.busy) return;
  if (!modelChoice.value) {
    loadModels();
    return;
  }
  prompt.value = "";
  fitPrompt();
  chat.send(text.trim());
}

function fitPrompt() {
  prompt.style.height = "auto";
  prompt.style.height = `${prompt.scrollHeight}px`;
}

find("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send(prompt.value);
});
prompt.addEventListener("input", fitPrompt);
prompt.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send(prompt.value);
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !document.querySelector("dialog[open]")) chat.stop();
});
find("stop").addEventListener("click", () => chat.stop());
find("new-chat").addEventListener("click", () => {
  chat.clear();
  prompt.focus();
});
for (const idea of document.querySelectorAll(".idea")) {
  idea.addEventListener("click", () => {
    prompt.focus();
    send(idea.textContent);
  });
}

async function loadModels() {
  const chosen = modelChoice.value;
  try {
    const { data } = await (await requestWithKey("v1/models")).json();
    const options = data.map(({ id }) => new Option(id, id, false, id === chosen));
    modelChoice.replaceChildren(...(options.length ? options : [new Option("no model is served", "")]));
    showProblem(options.length ? null : "The server has no model loaded. Load one, then open this page anew.");
  } catch (error) {
    modelChoice.replaceChildren(new Option("no models", ""));
    showProblem(explain(error));
  }
}

function showProblem(text) {
  document.querySelector(".problem")?.remove();
  if (text === null) return;
  const line = document.createElement("div");
  line.className = "error problem";
  line.setAttribute("role", "alert");
  const words = document.createElement("p");
  words.textContent = text;
  const again = document.createElement("button");
  again.type = "button";
  again.className = "quiet";
  again.textContent = "Try again";
  again.addEventListener("click", loadModels);
  line.append(words, again);
  find("composer").prepend(line);
}

// --- settings and views ---

find("open-settings").addEventListener("click", () => {
  find("settings-key").value = readKey();
  find("settings").showModal();
});
find("settings").addEventListener("close", () => {
  const key = find("settings-key").value.trim();
  if (key === readKey()) return;
  keepKey(key);
  loadModels();
});
find("temperature").addEventListener("input", (event) => {
  find("temperature-value").textContent = event.target.valueAsNumber.toFixed(1);
});
for (const tab of document.querySelectorAll("[data-show]")) {
  tab.addEventListener("click", () => {
    document.body.dataset.view = tab.dataset.show;
    for (const each of document.querySelectorAll("[data-show]")) {
      each.setAttribute("aria-pressed", String(each === tab));
    }
  });
}

// --- the engine ---

const panel = new EnginePanel(document);
let watching = null;

async function watch() {
  if (watching || document.hidden) return;
  const abort = (watching = new AbortController());
  let pauseMs = RETRY_FIRST_MS;
  while (!abort.signal.aborted) {
    try {
      for await (const data of events(await requestWithKey("live", { signal: abort.signal }))) {
        panel.show(JSON.parse(data), modelChoice.value);
        pauseMs = RETRY_FIRST_MS;
      }
    } catch (error) {
      if (abort.signal.aborted) break;
      panel.fail(explain(error));
    }
    await new Promise((resolve) => setTimeout(resolve, pauseMs));
    pauseMs = Math.min(pauseMs * 2, RETRY_MOST_MS);
  }
}

document.addEventListener("visibilitychange", () => {
  if (!document.hidden) {
    watch();
    return;
  }
  watching?.abort(); // nobody looks, so nobody has to count
  watching = null;
});

loadModels();
watch();
