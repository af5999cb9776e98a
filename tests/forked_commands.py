"""Python and the commands of this project as forks of one process, which has done their imports:
each would take seconds. What they do is what the installed ones do.
"""

import json
import os
import runpy
import signal
import socket
import sys
import threading
import traceback

CLIENT = """#!{python} -SE
import json, os, socket, sys
server = socket.socket(socket.AF_UNIX)
server.connect({path!r})
request = json.dumps([sys.argv, os.getcwd(), dict(os.environ)]).encode()
socket.send_fds(server, [len(request).to_bytes(4, "big")], [0, 1, 2])
server.sendall(request)
sys.exit(int(server.recv(9) or 1))
"""


def run_python(words):
    """Run a file, or what comes from standard input."""
    sys.argv = words
    if words[0] == "-":
        exec(compile(open(0).read(), "<stdin>", "exec"), {"__name__": "__main__"})
    else:
        sys.path.insert(0, os.path.dirname(os.path.abspath(words[0])))
        runpy.run_path(words[0], run_name="__main__")


def run(name, words):
    """Run a command in this process."""
    sys.argv = [name, *words]
    if name == "pcrshard":
        from pcrshard_command import main

        sys.exit(main())
    elif name == "torchrun":
        from torch.distributed.run import main as launch

        launch(words)
    else:
        run_python([word for word in words if word != "-u"])


def answer(connection):
    """Run the command that a client asks for with its files, folder and environment."""
    size, files, *_ = socket.recv_fds(connection, 4, 3)
    (path, *words), folder, environment = json.loads(
        connection.recv(int.from_bytes(size, "big"), socket.MSG_WAITALL)
    )
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    status = 1
    try:
        run(os.path.basename(path), words)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    threading._shutdown()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)


def serve(listener):
    """Fork for each client, once for the command and once to say how it ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            if (pid := os.fork()) == 0:
                answer(connection)
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            connection.send(str(status).encode())
            os._exit(0)
        connection.close()


def install(folder):
    """Put the commands into a folder before all others; a child of this process runs them."""
    folder.mkdir()
    path = str(folder / "socket")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    for name in ("pcrshard", "python", "torchrun"):
        (folder / name).write_text(CLIENT.format(python=sys.executable, path=path))
        (folder / name).chmod(0o755)
    os.environ["PATH"] = f"{folder}:{os.environ['PATH']}"
    os.environ["PYTHON_EXEC"] = str(folder / "python")  # of torchrun's ranks
    if (server := os.fork()) == 0:
        serve(listener)
    listener.close()
    return server
