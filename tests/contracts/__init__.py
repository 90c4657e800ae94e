"""The calls of asyncrl to vLLM, DeepSpeed, Ray and torch, checked against their signatures."""
