"""The child's side of the sandbox: a script that confines its own process and then runs `program.py` in the current folder.

Started by `sandbox.run_python` alone, which says what holds. It imports little, because every program pays for the start.
"""

from __future__ import annotations

import ctypes
import os
import resource
import struct
import sys

PROGRAM = "program.py"
CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER, PR_SET_PDEATHSIG, SIGKILL = 38, 22, 2, 1, 9
CAPABILITY_VERSION_3 = 0x20080522
# Landlock's rights on files, by bit, and how many bits each version of its interface knows
READ_FILE, READ_DIR, WRITE_FILE, REMOVE_FILE, MAKE_REG, TRUNCATE = 1 << 2, 1 << 3, 1 << 1, 1 << 5, 1 << 8, 1 << 14
LANDLOCK_BITS = {1: 13, 2: 14, 3: 15, 4: 15}
LANDLOCK_BITS_SINCE_5 = 16
# system calls refused, by number: the name, on x86_64, on aarch64 (None: does not exist there)
REFUSED: dict[str, tuple[int | None, int | None]] = {
    "socket": (41, 198), "socketpair": (53, 199), "clone": (56, 220), "fork": (57, None), "vfork": (58, None), "clone3": (435, 435),
    "execve": (59, 221), "execveat": (322, 281), "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240), "pidfd_send_signal": (424, 424), "ptrace": (101, 117),
    "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "mount": (165, 40), "unshare": (272, 97), "setns": (308, 268),
    "setrlimit": (160, 164), "io_uring_setup": (425, 425), "bpf": (321, 280), "keyctl": (250, 219), "add_key": (248, 217),
    "shmget": (29, 194), "memfd_create": (319, 279), "userfaultfd": (323, 282), "perf_event_open": (298, 241), "setpgid": (109, 154),
    "setsid": (112, 157), "prlimit64": (302, 261), "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452),
    "chown": (92, None), "fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54), "truncate": (76, 45), "utimensat": (280, 88),
    "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7),
}  # fmt: skip
# what the audit hook refuses outright, and where it looks at the path; by the beginnings of the events' names
FORBIDDEN = "socket. subprocess. pty. os.system os.exec os.fork os.posix_spawn os.spawn os.kill ctypes.dlopen"
CHANGING = "os.mkdir os.symlink os.link os.rename os.remove os.rmdir os.chmod os.chown os.truncate os.utime shutil."
ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}


def confine(cpu: int, memory: int, file: int, report: int) -> None:
    """Confine this process to `cpu` seconds, `memory` and `file` bytes, and write the names of the kernel's guards to the descriptor `report`."""
    resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu + 1))
    if sys.platform != "darwin":  # there the system refuses a limit on address space
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_FSIZE, (file, file))
    resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.path[:] = [path for path in sys.path if os.path.isdir(path)]
    readable = [*sys.path, "/lib", "/lib64", "/usr/lib", "/etc/ld.so.cache", "/usr/share/zoneinfo", "/dev/null", "/dev/urandom"]
    guards = _linux_guards(readable) if sys.platform == "linux" else []
    os.write(report, " ".join(["confined", *guards]).encode())
    os.close(report)
    _audit(tuple(os.path.realpath(path) for path in readable), os.path.realpath("."))


def execute(text: str) -> None:
    """Run a program as the main module. Its errors are printed without the lines of this file, and end the process with code 1."""
    sys.argv = [PROGRAM]
    scope = {"__name__": "__main__", "__builtins__": __builtins__, "exit": sys.exit, "quit": sys.exit}
    try:
        exec(compile(text, PROGRAM, "exec"), scope)
    except SystemExit:
        raise
    except BaseException as error:
        import traceback  # late: most programs end well, and the start of a child counts

        inside = error.__traceback__.tb_next if error.__traceback__ else None
        traceback.print_exception(type(error), error, inside)
        sys.exit(1)


def _linux_guards(readable: list[str]) -> list[str]:
    """Apply what this kernel offers; the names of what it took."""
    libc = ctypes.CDLL(None, use_errno=True)
    guards = []
    if libc.unshare(CLONE_NEWNET) == 0 or libc.unshare(CLONE_NEWUSER | CLONE_NEWNET) == 0:
        guards.append("network")
    header, nothing = struct.pack("Ii", CAPABILITY_VERSION_3, 0), bytes(24)
    libc.capset(header, nothing)  # an administrator's process could raise its own limits again
    if libc.prctl(PR_SET_NO_NEW_PRIVS, *map(ctypes.c_ulong, (1, 0, 0, 0))) != 0:
        return guards
    if _landlock(libc, readable):
        guards.append("landlock")
    libc.prctl(PR_SET_PDEATHSIG, SIGKILL)  # a program does not outlive the one who asked for it
    machine = os.uname().machine
    if machine in ARCHITECTURES and _seccomp(libc, *ARCHITECTURES[machine]):
        guards.append("seccomp")
    return guards


def _landlock(libc: ctypes.CDLL, readable: list[str]) -> bool:
    """Confine access to files (kernel documentation, userspace-api/landlock); False where the kernel cannot."""
    create, add, restrict = 444, 445, 446
    version = libc.syscall(create, None, ctypes.c_size_t(0), 1)
    if version < 1:
        return False
    handled = (1 << LANDLOCK_BITS.get(version, LANDLOCK_BITS_SINCE_5)) - 1
    rules = libc.syscall(create, struct.pack("Q", handled), ctypes.c_size_t(8), 0)
    if rules < 0:
        return False
    own = READ_FILE | READ_DIR | WRITE_FILE | REMOVE_FILE | MAKE_REG | TRUNCATE
    for path, rights in [(".", own), *((path, READ_FILE | READ_DIR) for path in readable)]:
        if os.path.exists(path):
            place = os.open(path, os.O_PATH)
            rights = rights if os.path.isdir(path) else READ_FILE
            libc.syscall(add, rules, 1, struct.pack("=Qi", rights & handled, place), 0)
            os.close(place)
    held = libc.syscall(restrict, rules, 0) == 0
    os.close(rules)
    return held


def _seccomp(libc: ctypes.CDLL, architecture: int, column: int) -> bool:
    """Refuse system calls with EPERM by a filter (kernel documentation, userspace-api/seccomp_filter); False where the kernel cannot."""
    numbers = [number for entry in REFUSED.values() if (number := entry[column]) is not None]
    load, jump_equal, jump_above, give = 0x20, 0x15, 0x35, 0x06
    kill, refuse, allow = 0x80000000, 0x00050001, 0x7FFF0000
    count = len(numbers)
    steps = [(load, 0, 0, 4), (jump_equal, 1, 0, architecture), (give, 0, 0, kill), (load, 0, 0, 0)]
    steps.append((jump_above, count + 1, 0, 0x40000000))  # the second set of numbers of x86_64
    steps += [(jump_equal, count - i, 0, number) for i, number in enumerate(numbers)]
    steps += [(give, 0, 0, allow), (give, 0, 0, refuse)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = struct.pack("HxxxxxxP", len(steps), ctypes.addressof(code))
    return libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, program, 0, 0) == 0


def _audit(readable: tuple[str, ...], folder: str) -> None:
    """Refuse files outside, sockets and processes with a readable error."""
    refused, changing = tuple(FORBIDDEN.split()), tuple(CHANGING.split())
    writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

    def inside(path: object, places: tuple[str, ...]) -> bool:
        if not isinstance(path, str | bytes | os.PathLike):  # an open file, a mode, or None for the folder itself
            return True
        real = os.path.realpath(os.fsdecode(path))
        return any(real == place or real.startswith(place + os.sep) for place in places)

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if event.startswith(refused):
            raise PermissionError(f"{event} is not allowed in the sandbox")
        if event in ("open", "os.listdir", "os.scandir") or event.startswith(changing):
            write = event.startswith(changing) or (event == "open" and isinstance(arguments[2], int) and bool(arguments[2] & writing))
            paths = arguments[:2] if event.startswith(changing) else (arguments[:1] or (".",))
            for path in paths:
                if not inside(path, (folder,) if write else (folder, *readable)):
                    raise PermissionError(f"{event} of {path!r} is not allowed in the sandbox")

    sys.addaudithook(hook)


if __name__ == "__main__":
    with open(PROGRAM, encoding="utf-8") as file:
        program = file.read()
    confine(*map(int, sys.argv[1:]))
    execute(program)
