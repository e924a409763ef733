"""What a version of weights is: its tensors, their blocks and digests, and parts of it. No I/O."""
