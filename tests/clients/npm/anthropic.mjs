// The `@anthropic-ai/sdk` package: says what it got, as JSON. node anthropic.mjs URL MODEL
import Anthropic from "@anthropic-ai/sdk";

const [url, model] = process.argv.slice(2);
const client = new Anthropic({ baseURL: url, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "think" }];
const told = {};

const answer = await client.messages.create({ model, messages, max_tokens: 200 });
told.blocks = answer.content.map((block) => block.type);
told.said = answer.content.at(-1).text;
told.signed = answer.content[0].signature.length > 0;

const stream = client.messages.stream({ model, messages, max_tokens: 200 });
let streamed = "";
stream.on("text", (text) => (streamed += text));
const final = await stream.finalMessage();
told.streamed = streamed;
told.stop = final.stop_reason;

const counted = await client.messages.countTokens({ model, messages });
const { input_tokens, cache_read_input_tokens } = answer.usage;
told.counted = counted.input_tokens === input_tokens + cache_read_input_tokens;

try {
  await client.messages.create({ model: "nobody", messages, max_tokens: 1 });
} catch (error) {
  told.error = [error.constructor.name, error.status];
}
console.log(JSON.stringify(told));
