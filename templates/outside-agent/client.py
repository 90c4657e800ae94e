"""A program outside of the run: it asks for sessions, calls the model in each, and says how it went.

    python client.py RUN/sessions.json

It needs only `openai` and `httpx`, and ends when the run has ended.
"""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai

WORKERS = 16  # sessions at a time


def play(session):
    """Play one session; returns its reward."""
    model = openai.OpenAI(base_url=session["base_url"], api_key=session["api_key"])
    row = session["prompt"]
    messages = [{"role": "user", "content": row["prompt"]}]
    answer = model.chat.completions.create(model=session["model"], messages=messages)
    reply = answer.choices[0].message.content or ""
    return 1.0 if reply.strip() == row["answer"] else 0.2 * sum(map(str.isdigit, reply)) / max(1, len(reply))


def work(access):
    """Play sessions until the run has ended; returns the number of rewards."""
    count, token = 0, {"authorization": f"Bearer {access['token']}"}
    with httpx.Client(base_url=access["url"], timeout=120, trust_env=False) as run:
        while True:
            try:
                opened = run.post("/sessions", json={}, headers=token)
                if opened.status_code == 503:  # no session is free now
                    continue
                session = opened.raise_for_status().json()
                body, key = {"reward": play(session)}, {"authorization": f"Bearer {session['api_key']}"}
                count += run.post(f"/sessions/{session['session']}/reward", json=body, headers=key).is_success
            except openai.APIStatusError as error:
                print(error.message)  # such as a session that has ended
            except (httpx.HTTPError, openai.APIConnectionError):
                return count


if __name__ == "__main__":
    access = json.loads(Path(sys.argv[1]).read_text())
    with ThreadPoolExecutor(WORKERS) as workers:
        print(f"{sum(workers.map(work, [access] * WORKERS))} sessions rewarded")
