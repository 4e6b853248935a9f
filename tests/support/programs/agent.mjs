// An agent of the official openai package: a loop with a calculator, streaming with --stream.
// The question is an argument, or the task's on stdin.
import { readFileSync } from "node:fs";
import OpenAI from "openai";

const words = process.argv.slice(2);
const stream = words.includes("--stream");
const question = words.find((w) => !w.startsWith("--")) ?? JSON.parse(readFileSync(0, "utf8")).question;

const client = new OpenAI({ maxRetries: 0 }); // URL and key come from the environment
const tools = [
  {
    type: "function",
    function: {
      name: "calculator",
      parameters: { type: "object", properties: { expression: { type: "string" } }, required: ["expression"] },
    },
  },
];

function calculator(text) {
  const match = /^\s*(-?\d+)\s*([-+*/])\s*(-?\d+)\s*$/.exec(JSON.parse(text).expression ?? "");
  if (!match) return "error: bad expression";
  const [a, b] = [BigInt(match[1]), BigInt(match[3])];
  if (match[2] === "/") return b === 0n || a % b !== 0n ? "error: not an integer" : String(a / b);
  return String({ "+": a + b, "-": a - b, "*": a * b }[match[2]]);
}

async function answer(messages) {
  const request = { model: "m", messages, tools };
  if (!stream) return (await client.chat.completions.create(request)).choices[0].message;
  return await client.chat.completions
    .stream({ ...request, stream_options: { include_usage: true } })
    .finalMessage();
}

const messages = [
  { role: "system", content: "Use the calculator." },
  { role: "user", content: question },
];
for (let turn = 0; turn < 4; turn++) {
  const message = await answer(messages);
  messages.push(message);
  if (!message.tool_calls?.length) {
    console.log(message.content ?? "");
    break;
  }
  for (const call of message.tool_calls) {
    let content;
    try {
      content = calculator(call.function.arguments);
    } catch (error) {
      content = `error: ${error.message}`;
    }
    messages.push({ role: "tool", tool_call_id: call.id, content });
  }
}
