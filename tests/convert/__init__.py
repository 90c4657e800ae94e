"""What asyncrl calls of vLLM, DeepSpeed, Ray and torch, held against their signatures."""
