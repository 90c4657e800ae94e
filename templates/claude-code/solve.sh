#!/bin/sh
# Plays one episode: Claude Code works in an empty folder, and check.py scores what it has left there.
task=$(python3 -c 'import json, os; print(json.load(open(os.environ["ASYNCRL_PROMPT_FILE"]))["prompt"])')
log=$ASYNCRL_SCRATCH/agent.log
{
# The server, its key and all model names are in the environment. IS_SANDBOX: it may do everything, as it is in a sandbox.
IS_SANDBOX=1 claude -p "$task" --max-turns 20 --permission-mode bypassPermissions
} >"$log" 2>&1 || tail -n 3 "$log" >&2  # at a limit an agent ends with an error; its work counts all the same
exec python3 "$ASYNCRL_FOLDER/check.py"
