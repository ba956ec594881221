// The conversation: what is sent, what streams in, and how it is shown. One answer at a time.

import { ApiError, events } from "./api.js";
import { explain } from "./advice.js";
import { render } from "./markdown.js";

const NEAR_END_PX = 80;
const number = new Intl.NumberFormat("en", { maximumFractionDigits: 1 });

export class Chat {
  /**
   * `post(body, signal)` gives the streaming response of /v1/chat/completions. `settings()` gives
   * { model, temperature, maxTokens, system }. `onState(busy)` is told when an answer begins and ends.
   */
  constructor({ list, welcome, announcer, post, settings, onState }) {
    Object.assign(this, { list, welcome, announcer, post, settings, onState });
    this.messages = [];
    this.running = null; // AbortController of the answer that streams
  }

  get busy() {
    return this.running !== null;
  }

  clear() {
    this.stop();
    this.running = null;
    this.messages = [];
    this.onState(false);
    this.list.replaceChildren(this.welcome);
    this.announcer.textContent = "New chat.";
  }

  stop() {
    this.running?.abort();
  }

  async send(text) {
    if (this.busy) return;
    this.messages.push({ role: "user", content: text });
    this.welcome.remove();
    const mine = article("user", "You");
    mine.body.textContent = text;
    this.list.append(mine.element);
    await this.answer();
  }

  async answer() {
    const { model, temperature, maxTokens, system } = this.settings();
    const messages = this.messages; // `clear` begins another list, which this answer is no part of
    const abort = (this.running = new AbortController());
    this.onState(true);
    const reply = new Reply(model, this.list);
    this.announcer.textContent = "Answering.";
    try {
      const response = await this.post(
        {
          model,
          messages: system ? [{ role: "system", content: system }, ...messages] : messages,
          temperature,
          max_tokens: maxTokens,
          stream: true,
          stream_options: { include_usage: true },
        },
        abort.signal,
      );
      await reply.read(response);
      reply.end(reply.finishReason === "length" ? `cut off at ${reply.tokens || maxTokens} tokens` : null);
    } catch (error) {
      if (abort.signal.aborted) reply.end("stopped");
      else reply.fail(error, () => this.retry(reply, messages));
    } finally {
      if (reply.text) messages.push({ role: "assistant", content: reply.text });
      if (this.running === abort) {
        this.running = null;
        this.announcer.textContent = reply.spoken;
        this.onState(false);
      }
    }
  }

  retry(reply, messages) {
    if (this.busy || this.messages !== messages) return;
    reply.element.remove();
    if (messages.at(-1)?.role === "assistant") messages.pop();
    this.answer();
  }
}

/** An answer as it grows. Drawn once a frame, however often text comes. */
class Reply {
  constructor(model, list) {
    const { element, body } = article("assistant", model);
    Object.assign(this, { element, body, list });
    this.text = "";
    this.tokens = 0;
    this.finishReason = null;
    this.startedMs = performance.now();
    this.firstMs = null;
    this.lastMs = null;
    this.frame = 0;
    element.setAttribute("aria-busy", "true");
    list.append(element);
    list.scrollTop = list.scrollHeight;
  }

  async read(response) {
    for await (const data of events(response)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ApiError(Number(chunk.error.code) || 500, chunk.error.message);
      if (chunk.usage) this.tokens = chunk.usage.completion_tokens;
      const choice = chunk.choices?.[0];
      if (choice?.delta?.content) this.add(choice.delta.content);
      if (choice?.finish_reason) this.finishReason = choice.finish_reason;
    }
    if (!this.finishReason) throw new ApiError(null, "the answer broke off");
  }

  add(text) {
    this.lastMs = performance.now();
    this.firstMs ??= this.lastMs;
    this.text += text;
    this.frame ||= requestAnimationFrame(() => this.draw());
  }

  draw() {
    cancelAnimationFrame(this.frame);
    this.frame = 0;
    const { list } = this;
    const follows = list.scrollHeight - list.scrollTop - list.clientHeight < NEAR_END_PX;
    render(this.body, this.text);
    if (follows) list.scrollTop = list.scrollHeight;
  }

  /** `note` is how it ended, where that is worth a word. */
  end(note) {
    this.draw();
    this.element.removeAttribute("aria-busy");
    const facts = [note, ...this.facts()].filter(Boolean);
    if (!this.text && !note) facts.unshift("an empty answer");
    this.addLine("facts", facts.join(" · "));
    this.spoken = [this.text, note && `The answer was ${note}.`].filter(Boolean).join(" ");
  }

  fail(error, again) {
    this.draw();
    this.element.removeAttribute("aria-busy");
    const words = explain(error);
    const line = this.addLine("error", words);
    const button = document.createElement("button");
    button.type = "button";
    button.className = "quiet";
    button.textContent = "Try again";
    button.addEventListener("click", again);
    line.append(button);
    this.spoken = words;
  }

  facts() {
    if (this.firstMs === null) return [];
    const facts = [];
    const spanS = (this.lastMs - this.firstMs) / 1000;
    if (this.tokens) facts.push(`${this.tokens} tokens`);
    if (this.tokens > 1 && spanS > 0) facts.push(`${number.format((this.tokens - 1) / spanS)} per second`);
    facts.push(`first after ${Math.round(this.firstMs - this.startedMs)} ms`);
    return facts;
  }

  addLine(kind, text) {
    const line = document.createElement("div");
    line.className = kind;
    const words = document.createElement("p");
    words.textContent = text;
    line.append(words);
    this.element.append(line);
    this.list.scrollTop = this.list.scrollHeight;
    return line;
  }
}

function article(role, name) {
  const element = document.createElement("article");
  element.className = `message ${role}`;
  const head = document.createElement("h2");
  head.className = "who";
  head.textContent = name;
  const body = document.createElement("div");
  body.className = "body";
  element.append(head, body);
  return { element, body };
}
