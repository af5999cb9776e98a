"""Operations on finished datasets: verify, export, stage."""
