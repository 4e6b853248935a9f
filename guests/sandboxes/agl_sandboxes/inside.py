"""What a rented machine runs: a command behind walls of its own, whose streams travel as lines of text.

The first line of standard input is the job, every other one is base64 of what the command is to read. Lines of output
are base64, too, after "1" or "2" for the command's standard output or error. Providers decode output as text, which
would damage bytes, and Daytona's SDK keeps the last two characters back until others follow: so lines end in two line
feeds. The first line of output says that input is read, the last one that the command has ended: output that ends
without it was cut off. Nothing but the standard library is here, as the machine has nothing else.
"""

import base64
import json
import os
import select
import subprocess
import sys
import threading

STARTED = "0"
ENDED = "3"
"""What the first and the last line of output are."""
BEAT_SECONDS = 1
"""After which silence there is an empty line."""
MOST_PIPED = 1 << 20
"""Bytes that a pipe can hold."""

# Namespaces of processes, mounts, IPC and network, a /proc of their own, and new file systems wherever a program may
# write. On the machine's own loopback, providers have services that run any command. That of the new network
# is down until its flags are set (SIOCSIFFLAGS: IFF_UP and IFF_RUNNING).
WALLS = """
set -e
python3 -c 'import fcntl, socket, struct
fcntl.ioctl(socket.socket(), 0x8914, struct.pack("16sH14x", b"lo", 0x41))'
for place in /tmp /dev/shm /var/tmp; do
    mkdir -p $place
    mount -t tmpfs -o size=$0m,nr_inodes=20000,nosuid,nodev,mode=1777 agl $place
done
exec env -i "$@"
"""


def main() -> None:
    """Run the command of the job until its input ends or it has ended."""
    _write(STARTED)
    job = json.loads(sys.stdin.buffer.readline())
    for path, data in job["files"].items():
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(base64.b64decode(data))
    variables = [f"{name}={value}" for name, value in job["environment"].items()]
    command = ["unshare", "--fork", "--pid", "--mount", "--ipc", "--net", "--mount-proc", "--kill-child", "--"]
    command += ["sh", "-c", WALLS, str(job["scratch_mb"]), *variables, *job["command"]]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0, cwd="/")
    assert process.stdin
    assert process.stdout
    assert process.stderr
    threading.Thread(target=_feed, args=(process.stdin.fileno(), process), daemon=True).start()
    _pump(process.stdout.fileno(), process.stderr.fileno())
    process.wait()
    _write(ENDED)
    os._exit(0)  # a thread may be reading


def _pump(out: int, err: int) -> None:
    """Pass on what is written, in order: what a command has written before it reports its end comes before that."""
    os.set_blocking(out, False)
    events = select.poll()
    streams = {out, err}
    for fd in streams:
        events.register(fd, select.POLLIN)
    while streams:
        if not (ready := {fd for fd, _ in events.poll(1000 * BEAT_SECONDS)}):
            _write("")
        report = os.read(err, 1 << 16) if err in ready else None
        try:
            data = os.read(out, MOST_PIPED) if out in streams else None
        except BlockingIOError:
            data = None
        for mark, fd, text in (("1", out, data), ("2", err, report)):
            if text:
                _write(mark + base64.b64encode(text).decode())
            elif text is not None:
                events.unregister(fd)
                streams.remove(fd)


def _write(line: str) -> None:
    os.write(1, f"{line}\n\n".encode())


def _feed(fd: int, process: "subprocess.Popen[bytes]") -> None:
    try:
        for line in sys.stdin.buffer:
            data = base64.b64decode(line)
            while data:
                data = data[os.write(fd, data) :]
    except OSError:
        return  # the command has ended
    process.kill()


if __name__ == "__main__":
    main()
