import assert from "node:assert";
import { Agent, run, setTracingDisabled, tool } from "@openai/agents";
import { z } from "zod";

setTracingDisabled(true);
const calculator = tool({
  name: "calculator",
  description: "Computes.",
  parameters: z.object({ expression: z.string() }),
  execute: async () => "85",
});
const agent = new Agent({ name: "solver", instructions: "Be brief.", model: "policy", tools: [calculator] });
const stream = process.argv[2] === "stream";
const result = await run(agent, "How many?", { stream });
if (stream) await result.completed;
assert.equal(result.finalOutput, "Answer: 85");
