"""What holds for every test."""

import signal

# A suite that a shell started in the background has SIGINT ignored, one under nohup SIGHUP, and so would everything
# that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
