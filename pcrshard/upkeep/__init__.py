"""What is done with finished datasets: verify, export, stage."""
