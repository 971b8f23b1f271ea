import os
import sys

import litellm

tool = {
    "name": "calculator",
    "description": "Computes.",
    "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
}
messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "How many?"}]
if sys.argv[1] == "chat":
    where = {"model": "openai/policy", "api_base": os.environ["OPENAI_BASE_URL"]}
else:
    where = {"model": "anthropic/policy", "api_base": os.environ["ANTHROPIC_BASE_URL"], "max_tokens": 300}
while True:
    answer = litellm.completion(messages=messages, tools=[{"type": "function", "function": tool}], **where)
    said = answer.choices[0].message
    messages.append(said)
    if not said.tool_calls:
        break
    messages += [{"role": "tool", "tool_call_id": call.id, "content": "85"} for call in said.tool_calls]
assert said.content == "Answer: 85"
