#!/bin/sh
# Plays one episode: Codex CLI works in an empty folder, and check.py scores what it has left there.
task=$(python3 -c 'import json, os; print(json.load(open(os.environ["ASYNCRL_PROMPT_FILE"]))["prompt"])')
log=$ASYNCRL_SCRATCH/agent.log
{
# The model and its server are in $CODEX_HOME/config.toml, which belongs to the episode. Codex' own sandbox is off: it is in one.
codex exec --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox "$task"
} >"$log" 2>&1 || tail -n 3 "$log" >&2  # at a limit an agent ends with an error; its work counts all the same
exec python3 "$ASYNCRL_FOLDER/check.py"
