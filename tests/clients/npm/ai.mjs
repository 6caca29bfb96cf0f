// The `ai` package with @ai-sdk/openai-compatible: says what it got, as JSON. node ai.mjs URL MODEL
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, jsonSchema, stepCountIs, streamText, tool } from "ai";

const [url, name] = process.argv.slice(2);
const model = createOpenAICompatible({ name: "moebius", baseURL: `${url}/v1` })(name);
const inputSchema = jsonSchema({ type: "object", properties: { text: { type: "string" } }, required: ["text"] });
const told = {};

const thought = await generateText({ model, prompt: "think" });
told.said = thought.text;
told.reasoning = thought.reasoningText;

let streamed = "";
for await (const text of streamText({ model, prompt: "Grüße aus Köln 🙂" }).textStream) streamed += text;
told.streamed = streamed;

const names = ["search", "read", "summarise", "translate"];
const tools = Object.fromEntries(
  names.map((step) => [
    step,
    tool({ description: step, inputSchema, execute: ({ text }) => `${step}(${text})` }),
  ]),
);
const looped = await generateText({ model, prompt: "go", tools, stopWhen: stepCountIs(6) });
told.loop = looped.text;
told.steps = looped.steps.length;
console.log(JSON.stringify(told));
