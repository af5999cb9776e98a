# Sourced by jobs that may reach their time limit, with #SBATCH --signal=B:USR1@60.
#
# until_limit COMMAND...: a minute before the limit SLURM sends USR1 to the job's shell, which hands
# it on to the command; a command that ends for it with a status that is not 0 is not done, and the
# job queues again under its own number.
until_limit() {
  limit=
  step=
  trap 'limit=1; [ -z "$step" ] || kill -USR1 "$step"' USR1
  "$@" &
  step=$!
  status=0
  # The trap interrupts wait, which is then called again.
  until wait "$step" && status=0 || { status=$?; ! kill -0 "$step" 2>/dev/null; }; do :; done
  if [ "$limit" ] && [ "$status" != 0 ]; then
    echo "time limit: job $SLURM_JOB_ID goes back into the queue"
    exec scontrol requeue "$SLURM_JOB_ID"
  fi
  return "$status"
}
