// Verifies one webhook, {headers, body, secret} as JSON on stdin; prints the event.
import fs from "node:fs";
import OpenAI from "openai";

const { headers, body, secret } = JSON.parse(fs.readFileSync(0, "utf8"));
const client = new OpenAI({ apiKey: "none" });
console.log(JSON.stringify(await client.webhooks.unwrap(body, headers, secret)));
