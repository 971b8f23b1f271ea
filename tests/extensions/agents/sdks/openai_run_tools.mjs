import assert from "node:assert";
import OpenAI from "openai";

const calculator = {
  type: "function",
  function: {
    name: "calculator",
    description: "Computes.",
    parameters: { type: "object", properties: { expression: { type: "string" } } },
    function: () => "85",
    parse: JSON.parse,
  },
};
const messages = [{ role: "system", content: "Be brief." }, { role: "user", content: "How many?" }];
const stream = process.argv[2] === "stream";
const runner = new OpenAI().chat.completions.runTools({ model: "policy", messages, tools: [calculator], stream });
assert.equal(await runner.finalContent(), "Answer: 85");
