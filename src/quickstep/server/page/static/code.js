// A request as code: curl, Python and JavaScript.

const KEY = "$QUICKSTEP_API_KEY";
const quoted = (text) => `'${text.replaceAll("'", `'\\''`)}'`;

export function codeOf(language, route, body, hasKey) {
  const url = new URL(route, document.baseURI);
  if (language === "curl") {
    const key = hasKey ? ` \\\n  -H "Authorization: Bearer ${KEY}"` : "";
    return `curl -N ${quoted(url.href)} \\\n  -H 'Content-Type: application/json'${key} \\\n  -d ${quoted(JSON.stringify(body, null, 2))}\n`;
  }
  if (language === "python") {
    const known = ["model", "messages", "prompt", "stream", "stream_options", "temperature", "top_p", "seed",
      "max_tokens", "stop", "logprobs", "top_logprobs", "presence_penalty", "frequency_penalty", "tools",
      "response_format"];
    const of = (names) => Object.fromEntries(names.map((name) => [name, body[name]]));
    const others = of(Object.keys(body).filter((name) => !known.includes(name)));
    const own = { model: "default", ...of(known.filter((name) => name in body)) };
    const lines = Object.entries(own).map(([name, value]) => `    ${name}=${python(value)},\n`).join("");
    const base = new URL("v1", document.baseURI).href;
    const key = hasKey ? `os.environ["QUICKSTEP_API_KEY"]` : `"none"`;
    const call = "messages" in body ? "chat.completions" : "completions";
    const text = "messages" in body ? "chunk.choices[0].delta.content" : "chunk.choices[0].text";
    return `${hasKey ? "import os\n\n" : ""}from openai import OpenAI\n\nclient = OpenAI(base_url=${JSON.stringify(base)}, api_key=${key})\n` +
      `stream = client.${call}.create(\n${lines}    extra_body=${python(others)},\n)\n` +
      `for chunk in stream:\n    if chunk.choices:\n        print(${text} or "", end="", flush=True)\n`;
  }
  const headers = { "content-type": "application/json", ...(hasKey && { authorization: "Bearer KEY" }) };
  return `const response = await fetch(${JSON.stringify(url.href)}, {\n  method: "POST",\n  headers: ${JSON.stringify(headers)},\n` +
    `  body: JSON.stringify(${JSON.stringify(body, null, 2)}),\n});\n` +
    `for await (const part of response.body.pipeThrough(new TextDecoderStream())) console.log(part);\n`;
}

/** A value of JSON as Python writes it. */
function python(value) {
  if (value === null || value === undefined) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (Array.isArray(value)) return `[${value.map(python).join(", ")}]`;
  if (typeof value === "object") {
    return `{${Object.entries(value).map(([name, item]) => `${JSON.stringify(name)}: ${python(item)}`).join(", ")}}`;
  }
  return JSON.stringify(value);
}
