"""How ranks of torch.distributed meet at an ``asyncdist store`` daemon: by URL, or through torchrun."""
