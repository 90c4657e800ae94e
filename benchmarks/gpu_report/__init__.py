"""What a machine with GPUs does with asyncrl: `make gpu`."""
