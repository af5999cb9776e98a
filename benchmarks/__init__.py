"""What the package costs on this machine, a module for each subject."""
