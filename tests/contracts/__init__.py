"""The calls of asyncrl to vLLM, DeepSpeed and Ray, checked against their signatures."""
