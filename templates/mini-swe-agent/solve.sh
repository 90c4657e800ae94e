#!/bin/sh
# Plays one episode: mini-swe-agent works in an empty folder, and check.py scores what it has left there.
task=$(python3 -c 'import json, os; print(json.load(open(os.environ["ASYNCRL_PROMPT_FILE"]))["prompt"])')
log=$ASYNCRL_SCRATCH/agent.log
{
# -c: its own settings, and the number of its calls. The model, its server and its key are in the environment.
mini -y --exit-immediately -c mini.yaml -c agent.step_limit=20 -o "$HOME/trajectory.json" -t "$task"
} >"$log" 2>&1 || tail -n 3 "$log" >&2  # at a limit an agent ends with an error; its work counts all the same
exec python3 "$ASYNCRL_FOLDER/check.py"
