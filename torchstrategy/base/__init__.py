"""What everything else stands on: values, options, devices, the stack of contexts, and what is said in the log."""
