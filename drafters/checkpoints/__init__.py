"""Files and configurations of heads. Families of checkpoints differ in layout and tensor names."""
