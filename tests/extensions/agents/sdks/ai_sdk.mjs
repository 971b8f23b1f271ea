import assert from "node:assert";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const [provider, mode] = process.argv.slice(2);
const env = process.env;
const models = {
  responses: () => createOpenAI()("policy"),
  chat: () => createOpenAI().chat("policy"),
  compatible: () =>
    createOpenAICompatible({ name: "policy", baseURL: env.OPENAI_BASE_URL, apiKey: env.OPENAI_API_KEY })("policy"),
  messages: () => createAnthropic({ baseURL: `${env.ANTHROPIC_BASE_URL}/v1`, apiKey: env.ANTHROPIC_API_KEY })("policy"),
};
const asked = {
  model: models[provider](),
  system: "Be brief.",
  prompt: "How many?",
  stopWhen: stepCountIs(5),
  tools: {
    calculator: tool({
      description: "Computes.",
      inputSchema: z.object({ expression: z.string() }),
      execute: async () => "85",
    }),
  },
};
const result = mode === "stream" ? streamText(asked) : await generateText(asked);
assert.equal(await result.text, "Answer: 85");
