// What programs do with background responses by OpenAI's SDK in JavaScript, against the gateway at BASE_URL;
// prints one JSON. Every answer goes into the file ANSWERS as well, a JSON each line.
import fs from "node:fs";
import OpenAI from "openai";

const { BASE_URL, ANSWERS, MODEL } = process.env;

async function recording(url, init) {
  const response = await fetch(url, init);
  const kind = response.headers.get("content-type") ?? "";
  const told = { method: init.method.toUpperCase(), path: new URL(url).pathname, status: response.status, kind };
  const body = await response.clone().text();
  fs.appendFileSync(ANSWERS, JSON.stringify({ ...told, body }) + "\n");
  return response;
}

const client = new OpenAI({ baseURL: BASE_URL, apiKey: "none", fetch: recording });
const made = await client.responses.create({ model: MODEL, input: "Hello", background: true });
let answer = made;
while (["queued", "in_progress"].includes(answer.status)) {
  await new Promise((resolve) => setTimeout(resolve, 100));
  answer = await client.responses.retrieve(made.id);
}
const items = [];
for await (const item of client.responses.inputItems.list(made.id)) items.push(item.content[0].text);
const slow = await client.responses.create({ model: MODEL, input: "Hello", background: true, user: "simulate:sleep=60" });
const cancelled = await client.responses.cancel(slow.id);
await client.responses.delete(made.id);
const deleted = await client.responses.retrieve(made.id).catch((error) => error.constructor.name);
console.log(JSON.stringify({
  created: made.status, background: made.background, ended: answer.status, text: answer.output_text, items,
  cancelled: cancelled.status, deleted,
}));
