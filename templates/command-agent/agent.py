"""The agent of this task, a separate program: it calls an OpenAI-compatible server, and prints its reward.

It uses only Python's standard library, and could be written in any other language.
"""

import json
import os
import urllib.request


def ask(messages: list[dict[str, str]]) -> str:
    """Return the model's reply. ``OPENAI_BASE_URL`` leads to the model under training, for this episode only."""
    body = {"model": os.environ["OPENAI_MODEL"], "messages": messages}
    request = urllib.request.Request(
        f"{os.environ['OPENAI_BASE_URL']}/chat/completions",
        data=json.dumps(body).encode(),
        headers={"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as response:
        return json.load(response)["choices"][0]["message"]["content"] or ""


row = json.loads(os.environ["ASYNCRL_PROMPT"])  # the row of the JSON Lines file: `prompt`, `uid` and its other keys
messages = [{"role": "user", "content": row["prompt"]}]
reward = 0.0
for _ in range(2):
    reply = ask(messages)
    if reply.strip() == row["answer"]:
        reward = 1.0
        break
    reward = max(reward, 0.2 * sum(map(str.isdigit, reply)) / max(1, len(reply)))
    messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": "no, digits only:"}]
print(json.dumps({"reward": reward, "metrics": {"messages": len(messages)}}))
