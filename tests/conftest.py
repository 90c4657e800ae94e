"""What holds for every test."""

import signal

# A suite that a shell started in the background has SIGINT ignored, and so would everything that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
