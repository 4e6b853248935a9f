// Two requests to Google's API without its SDK: a tool call, and the answer that follows the tool's result.
const base = process.env.GOOGLE_GEMINI_BASE_URL;
const form = process.argv[2];
const url = `${base}/v1beta/models/gemini-x:${form}`;
const key = form.includes("key=") ? {} : { "x-goog-api-key": process.env.GEMINI_API_KEY };
const contents = [{ role: "user", parts: [{ text: "What is 12 * 3?" }] }];
const parameters = { type: "OBJECT", properties: { expression: { type: "STRING" } } };
const body = {
  systemInstruction: { parts: [{ text: "Use the calculator." }] },
  tools: [{ functionDeclarations: [{ name: "calculator", description: "Work out a sum.", parameters }] }],
  generationConfig: { temperature: 0.5, maxOutputTokens: 60 },
};

async function ask() {
  const headers = { "content-type": "application/json", ...key };
  const answer = await fetch(url, { method: "POST", headers, body: JSON.stringify({ ...body, contents }) });
  const text = await answer.text();
  if (!answer.ok) throw new Error(text);
  const chunks = form.includes("alt=sse")
    ? text.split("\n\n").filter(Boolean).map((event) => JSON.parse(event.slice("data: ".length)))
    : [JSON.parse(text)].flat();
  return chunks.flatMap((chunk) => chunk.candidates[0].content.parts).filter((part) => part.text !== "");
}

const called = await ask();
contents.push({ role: "model", parts: called });
const results = called
  .filter((part) => part.functionCall)
  .map(({ functionCall: { id, name } }) => ({ functionResponse: { id, name, response: { output: "36" } } }));
contents.push({ role: "user", parts: results });
console.log((await ask()).map((part) => part.text).join(""));
