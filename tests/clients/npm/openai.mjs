// The `openai` package: says what it got, as JSON. node openai.mjs URL MODEL
import OpenAI from "openai";

const [url, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "Grüße aus Köln 🙂" }];
const parameters = { type: "object", properties: { text: { type: "string" } }, required: ["text"] };
const told = {};

told.said = (await client.chat.completions.create({ model, messages })).choices[0].message.content;

let streamed = "";
for await (const chunk of await client.chat.completions.create({ model, messages, stream: true })) {
  streamed += chunk.choices[0]?.delta?.content ?? "";
}
told.streamed = streamed;

const runner = client.chat.completions.runTools({
  model,
  stream: true,
  messages: [{ role: "user", content: "go" }],
  tools: ["search", "read", "summarise", "translate"].map((name) => ({
    type: "function",
    function: { name, description: name, parameters, parse: JSON.parse, function: ({ text }) => `${name}(${text})` },
  })),
});
told.loop = await runner.finalContent();

const response = client.responses.stream({ model, input: "think" });
const kinds = [];
for await (const event of response) kinds.push(event.type);
told.response = (await response.finalResponse()).output_text;
told.last = kinds.at(-1);

told.models = [];
for await (const one of client.models.list()) told.models.push(one.id);

try {
  await client.chat.completions.create({ model: "nobody", messages });
} catch (error) {
  told.error = [error.constructor.name, error.status, error.code];
}
console.log(JSON.stringify(told));
