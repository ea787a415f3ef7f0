"""What holds for all tests."""

import signal

# A shell without job control starts background jobs with SIGINT ignored, and every process started here would inherit
# that: nothing could be interrupted, and what a test says about Ctrl-C would be about the shell.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
