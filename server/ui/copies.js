// A request as somebody else would send it: with curl, or with the official Python client.

import { signedInKey } from "./api.js";

export const PATHS = { chat: "v1/chat/completions", completion: "v1/completions" };

export function asCurl(body) {
  const path = PATHS[body.messages ? "chat" : "completion"];
  const text = JSON.stringify({ ...body, stream: true }, null, 2).replaceAll("'", "'\\''");
  const key = signedInKey() ? " \\\n  -H \"Authorization: Bearer $PAGESTREAM_API_KEY\"" : "";
  return `curl -N ${new URL(path, document.baseURI)} \\\n  -H 'Content-Type: application/json'${key} \\\n  -d '${text}'\n`;
}

const OPENAI_OWN = new Set([
  "model", "messages", "prompt", "max_tokens", "temperature", "n", "best_of", "top_p", "presence_penalty", "frequency_penalty", "seed",
  "stop", "logprobs", "top_logprobs",
]);

export function asPython(body) {
  const own = Object.entries(body).filter(([name]) => OPENAI_OWN.has(name));
  const extra = Object.entries(body).filter(([name]) => !OPENAI_OWN.has(name));
  const lines = own.map(([name, value]) => `    ${name}=${literal(value)},`);
  if (extra.length) lines.push(`    extra_body=${literal(Object.fromEntries(extra))},`);
  const [method, text] = body.messages ? ["chat.completions", ".delta.content or \"\""] : ["completions", ".text"];
  const key = signedInKey() ? "os.environ[\"PAGESTREAM_API_KEY\"]" : "\"none\"";
  // The pieces of several answers come as they are made, each with the number of its answer.
  const reading = body.n > 1
    ? [`answers = [""] * ${body.n}`, "for chunk in stream:", "    for choice in chunk.choices:",
      `        answers[choice.index] += choice${text}`, "print(*answers, sep=\"\\n---\\n\")"]
    : ["for chunk in stream:", `    print(chunk.choices[0]${text}, end="", flush=True)`];
  return [
    ...(signedInKey() ? ["import os", ""] : []), "from openai import OpenAI", "",
    `client = OpenAI(base_url=${JSON.stringify(new URL("v1", document.baseURI).href)}, api_key=${key})`,
    `stream = client.${method}.create(`, ...lines, "    stream=True,", ")",
    ...reading, "",
  ].join("\n");
}

/** The value as Python writes it. */
function literal(value) {
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (Array.isArray(value)) return `[${value.map(literal).join(", ")}]`;
  if (typeof value === "object") return `{${Object.entries(value).map(([name, each]) => `${JSON.stringify(name)}: ${literal(each)}`).join(", ")}}`;
  return JSON.stringify(value);
}
