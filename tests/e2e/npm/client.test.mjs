// The official npm package against a gateway whose URL and key are in the environment, as it expects them.
import assert from "node:assert/strict";
import OpenAI from "openai";

const ai = new OpenAI({ maxRetries: 0 });
const model = "llm";
const messages = [{ role: "user", content: "Say hi." }];

const models = await ai.models.list();
assert.deepEqual(models.data.map((one) => one.id), [model]);

const asked = { model, messages, max_tokens: 6, temperature: 0 };
const whole = await ai.chat.completions.create(asked);
const text = whole.choices[0].message.content;
assert.equal(whole.usage.completion_tokens, 6);

let streamed = "";
let usage = null;
const stream = await ai.chat.completions.create({
  ...asked,
  stream: true,
  stream_options: { include_usage: true },
});
for await (const chunk of stream) {
  streamed += chunk.choices[0]?.delta.content ?? "";
  usage = chunk.usage ?? usage;
}
assert.equal(streamed, text);
assert.equal(usage.completion_tokens, 6);

const final = await ai.chat.completions.stream(asked).finalChatCompletion();
assert.equal(final.choices[0].message.content, text);

const completion = await ai.completions.create({
  model,
  prompt: "The capital of France is",
  max_tokens: 2,
  temperature: 0,
});
assert.equal(completion.choices[0].text, " Paris.");

const vectors = await ai.embeddings.create({ model, input: "a cat", dimensions: 4 });
assert.equal(vectors.data[0].embedding.length, 4);

await assert.rejects(ai.chat.completions.create({ ...asked, temperature: -1 }), (error) => {
  assert.ok(error instanceof OpenAI.BadRequestError);
  assert.equal(error.param, "temperature");
  return true;
});

const left = await ai.chat.completions.create({ model, messages, stream: true });
for await (const chunk of left) {
  if (chunk.choices[0].delta.content) break; // which aborts the request
}
console.log("all passed");
