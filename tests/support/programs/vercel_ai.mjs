// Asks a policy by Vercel's AI SDK with each of its providers, and prints what each of them read as JSON.
import { generateObject, generateText, jsonSchema, stepCountIs, streamObject, streamText, tool } from "ai";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createGoogleGenerativeAI } from "@ai-sdk/google";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";

// They would be printed, too.
globalThis.AI_SDK_LOG_WARNINGS = false;

const [base, apiKey] = process.argv.slice(2);
const openai = createOpenAI({ baseURL: `${base}/v1`, apiKey });
const compatible = { name: "policy", baseURL: `${base}/v1`, apiKey, supportsStructuredOutputs: true, includeUsage: true };
const models = {
  chat: openai.chat("m"),
  responses: openai.responses("m"),
  compatible: createOpenAICompatible(compatible)("m"),
  messages: createAnthropic({ baseURL: `${base}/v1`, apiKey })("m"),
  google: createGoogleGenerativeAI({ baseURL: `${base}/v1beta`, apiKey })("m"),
};
const schema = jsonSchema({
  type: "object",
  properties: { n: { type: "integer" } },
  required: ["n"],
  additionalProperties: false,
});
const found = {};

for (const [name, model] of Object.entries(models)) {
  const counted = [];
  const count = tool({
    description: "Counts.",
    inputSchema: schema,
    execute: async ({ n }) => {
      counted.push(n);
      return "a dozen";
    },
  });
  const plain = { model, maxRetries: 0, prompt: "how many?" };
  const agent = { ...plain, tools: { count }, stopWhen: stepCountIs(3) };
  const seen = { counted };
  seen.text = (await generateText(plain)).text;
  seen.agent = (await generateText(agent)).text;
  const stream = streamText(agent);
  seen.streamed = "";
  for await (const text of stream.textStream) seen.streamed += text;
  seen.steps = (await stream.steps).length;
  seen.finish = await stream.finishReason;
  seen.tokens = (await stream.totalUsage).outputTokens;
  seen.object = (await generateObject({ ...plain, schema })).object;
  const objects = streamObject({ ...plain, schema });
  for await (const _ of objects.partialObjectStream);
  seen.streamedObject = await objects.object;
  found[name] = seen;
}

console.log(JSON.stringify(found));
