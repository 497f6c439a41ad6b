"""A child without a trainer: does what the test has planned for its attempt."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from modelzoo_trainer.tools.supervisor.child import Child
from modelzoo_trainer.tools.supervisor.protocol import LaunchSpec, SharedStatus, TimeKind


class Actions:
    """What it can do, by name."""

    def __init__(self, child: Child, spec: LaunchSpec) -> None:
        self.child = child
        self.folder = Path(spec.folder)
        self.shared = SharedStatus.attach(spec.descriptor)

    def start(self, step: str) -> None:
        self.shared.start_step = self.shared.step = int(step)
        self.shared.spent_at_start = self.shared.seconds[TimeKind.STEPS]
        self.shared.switch(TimeKind.DATA)

    def train(self, step: str) -> None:
        self.shared.switch(TimeKind.STEPS)
        time.sleep(0.01)
        self.shared.step = int(step)
        self.shared.switch(TimeKind.DATA)

    def save(self, step: str) -> None:
        self.shared.saved_step = int(step)
        self.shared.spent_at_save = self.shared.seconds[TimeKind.STEPS]
        self.child._update_report(checkpoint=f"checkpoint_{step}")

    def done(self, num: str) -> None:
        self.shared.num_done = int(num)

    def fail(self, message: str) -> None:
        self.child.fail(RuntimeError(message))
        sys.exit(1)

    def miss(self, module: str) -> None:
        self.child.fail(ModuleNotFoundError(f"No module named {module!r}"))
        sys.exit(1)

    def interrupted(self, by: str) -> None:
        self.child._update_report(interrupted=by)

    def exit(self, code: str) -> None:
        sys.exit(int(code))

    def signal(self, name: str) -> None:
        os.kill(os.getpid(), getattr(signal, name))

    def note(self, name: str) -> None:
        signal.signal(getattr(signal, name), lambda number, frame: self.tell(f"got {name}"))

    def heed(self, name: str) -> None:
        def leave(number: int, frame: object) -> None:
            self.tell(f"got {name}")
            os._exit(143)

        signal.signal(getattr(signal, name), leave)

    def sleep(self, seconds: str) -> None:
        time.sleep(float(seconds))

    def leave_behind(self, seconds: str) -> None:
        reader, writer = os.pipe()
        if not os.fork():
            self.tell("left behind")
            os.write(writer, b"told")
            time.sleep(float(seconds))
            os._exit(0)
        os.read(reader, 4)

    def block_ledger(self, nothing: str) -> None:
        (self.folder / "ledger.json").mkdir()

    def tell(self, text: str) -> None:
        with Path("told").open("a") as file:
            file.write(f"{text} {os.getpid()}\n")

    def output(self, text: str) -> None:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()


def main() -> None:
    spec = LaunchSpec.parse(sys.argv[-1])
    with Path("specs").open("a") as file:
        file.write(sys.argv[-1] + "\n")
    actions = Actions(Child(spec), spec)
    plan = json.loads(sys.argv[1])
    for action in plan[min(spec.attempt, len(plan)) - 1]:
        name, _, value = action.partition(":")
        getattr(actions, name)(value)
    actions.done("99")  # all trainers of any plan


if __name__ == "__main__":
    main()
