// What programs do with OpenAI's SDK in JavaScript, against the gateway at BASE_URL; prints one JSON.
// Every answer goes into the file ANSWERS as well, a JSON each line, to be held against its schema.
import fs from "node:fs";
import OpenAI, { toFile } from "openai";

const { BASE_URL, ANSWERS, INPUT, MODEL } = process.env;

async function recording(url, init) {
  const response = await fetch(url, init);
  const kind = response.headers.get("content-type") ?? "";
  if (response.status >= 400 || /json$|event-stream/.test(kind.split(";")[0])) {
    const path = new URL(url).pathname;
    const told = { method: init.method, path, status: response.status, kind };
    response.clone().text().then((body) => fs.appendFileSync(ANSWERS, JSON.stringify({ ...told, body }) + "\n"));
  }
  return response;
}

const client = new OpenAI({ baseURL: BASE_URL, apiKey: "none", fetch: recording });
const seen = {};

async function batch(fileId, more = {}) {
  const made = await client.batches.create({
    input_file_id: fileId, endpoint: "/v1/chat/completions", completion_window: "24h", ...more,
  });
  return made;
}

async function ended(id) {
  for (;;) {
    const now = await client.batches.retrieve(id);
    if (["completed", "failed", "expired", "cancelled"].includes(now.status)) return now;
    await new Promise((resolve) => setTimeout(resolve, 200));
  }
}

// A file by a stream: it comes first in the form, chunked.
const file = await client.files.create({ file: fs.createReadStream(INPUT), purpose: "batch" });
seen.file = await client.files.waitForProcessing(file.id);
const whole = await ended((await batch(file.id, { metadata: { by: "node" } })).id);
seen.batch = whole;
seen.output = await (await client.files.content(whole.output_file_id)).text();

// The same file in parts.
const bytes = fs.readFileSync(INPUT);
const upload = await client.uploads.create({
  bytes: bytes.length, filename: "in.jsonl", mime_type: "application/jsonl", purpose: "batch",
});
const half = Math.floor(bytes.length / 2);
const parts = [];
for (const piece of [bytes.subarray(0, half), bytes.subarray(half)]) {
  parts.push((await client.uploads.parts.create(upload.id, { data: await toFile(piece) })).id);
}
const done = await client.uploads.complete(upload.id, { part_ids: parts });
seen.upload = { status: done.status, same: (await (await client.files.content(done.file.id)).text()) === bytes.toString() };

// Pages, one batch each.
const ids = [];
for await (const each of client.batches.list({ limit: 1 })) ids.push(each.id);
seen.listed = ids.includes(whole.id);
const names = [];
for await (const each of client.files.list({ limit: 2 })) names.push(each.id);
seen.files = [...new Set(names)].length === names.length && names.includes(done.file.id);

const unread = await batch("file-nothing").catch((error) => error);
seen.unread = { kind: unread.constructor.name, status: unread.status, id: Boolean(unread.requestID) };
const refused = await client.chat.completions.create({ model: MODEL, messages: [], n: 0 }).catch((error) => error);
seen.refused = { kind: refused.constructor.name, param: refused.param };
const nobody = await client.models.retrieve("org/none").catch((error) => error);
seen.nobody = nobody.constructor.name;

const question = JSON.parse(bytes.toString().split("\n")[0]).body;
const { data, response } = await client.chat.completions.create(question).withResponse();
seen.chat = data.choices[0].message.content;
seen.requestId = data._request_id === response.headers.get("x-request-id");
seen.streamed = "";
const stream = await client.chat.completions.create({ ...question, stream: true, stream_options: { include_usage: true } });
for await (const chunk of stream) {
  seen.streamed += chunk.choices[0]?.delta?.content ?? "";
  if (chunk.usage) seen.usage = chunk.usage.completion_tokens;
}
const completion = await client.completions.create({ model: MODEL, prompt: "2 + 3 =", max_tokens: 4, temperature: 0 });
seen.completion = completion.choices[0].text;
seen.response = (await client.responses.create({ model: MODEL, input: question.messages.at(-1).content, max_output_tokens: 16, temperature: 0 })).output_text;
seen.models = [];
for await (const model of client.models.list()) seen.models.push(model.id);
seen.model = (await client.models.retrieve(MODEL)).id;
seen.deleted = (await client.files.delete(done.file.id)).deleted;
console.log(JSON.stringify(seen));
