// Asks a policy by the three SDKs for Node, and prints what each of them read as JSON.
import OpenAI from "openai";
import Anthropic from "@anthropic-ai/sdk";
import { GoogleGenAI } from "@google/genai";

const [base, key] = process.argv.slice(2);
const user = [{ role: "user", content: "how many?" }];
const openai = new OpenAI({ baseURL: `${base}/v1`, apiKey: key, maxRetries: 0 });
const anthropic = new Anthropic({ baseURL: base, apiKey: key, maxRetries: 0 });
const google = new GoogleGenAI({ apiKey: key, httpOptions: { baseUrl: base } });

async function failure(work) {
  try {
    await work();
  } catch (error) {
    return { status: error.status, message: error.message, id: error.requestID ?? null };
  }
  return null;
}

async function collected(list) {
  const names = [];
  for await (const model of await list) names.push(model.id ?? model.name);
  return names;
}

const chat = { model: "m", messages: user };
const response = { model: "m", input: user };
const message = { model: "m", max_tokens: 99, messages: user };
const content = { model: "m", contents: "how many?" };
const found = { chat: {}, responses: {}, messages: {}, google: {} };

let whole = await openai.chat.completions.create({ ...chat, modalities: ["text"], audio: null });
found.chat.text = whole.choices[0].message.content;
found.chat.id = [whole._request_id, whole.id];
found.chat.streamed = "";
for await (const chunk of await openai.chat.completions.create({ ...chat, stream: true }))
  found.chat.streamed += chunk.choices[0]?.delta.content ?? "";
found.chat.refused = await failure(() => openai.chat.completions.create({ ...chat, frequency_penalty: 1 }));
found.chat.models = await collected(openai.models.list());

whole = await openai.responses.create({ ...response, background: false, conversation: null });
found.responses.text = whole.output_text;
found.responses.id = [whole._request_id, whole.id];
found.responses.streamed = "";
for await (const event of await openai.responses.create({ ...response, stream: true }))
  if (event.type === "response.output_text.delta") found.responses.streamed += event.delta;
found.responses.refused = await failure(() => openai.responses.create({ ...response, background: true }));
found.responses.models = await collected(openai.models.list());

whole = await anthropic.messages.create({ ...message, container: null });
found.messages.text = whole.content[0].text;
found.messages.id = [whole._request_id, whole.id];
found.messages.streamed = await anthropic.messages.stream(message).finalText();
found.messages.refused = await failure(() => anthropic.messages.create({ ...message, container: "c" }));
found.messages.models = await collected(anthropic.models.list());

whole = await google.models.generateContent({ ...content, config: { responseModalities: ["TEXT"] } });
found.google.text = whole.text;
found.google.id = [whole.responseId, whole.responseId];
found.google.streamed = "";
for await (const chunk of await google.models.generateContentStream(content)) found.google.streamed += chunk.text ?? "";
found.google.refused = await failure(() =>
  google.models.generateContent({ ...content, config: { responseModalities: ["IMAGE"] } }),
);
found.google.models = await collected(google.models.list());

console.log(JSON.stringify(found));
