"""The calls of asyncrl to vLLM and DeepSpeed, checked against their signatures."""
