import Anthropic from "@anthropic-ai/sdk";

const input_schema = { type: "object", properties: { expression: { type: "string" } } };
const tools = [{ name: "calculator", description: "Computes.", input_schema }];
const messages = [{ role: "user", content: "How many?" }];
for (;;) {
  const asked = { model: "policy", max_tokens: 300, system: "Be brief.", messages, tools };
  const answer = await new Anthropic().messages.stream(asked).finalMessage();
  messages.push({ role: "assistant", content: answer.content });
  const results = answer.content
    .filter((block) => block.type === "tool_use")
    .map((block) => ({ type: "tool_result", tool_use_id: block.id, content: "85" }));
  if (results.length === 0) break;
  messages.push({ role: "user", content: results });
}
