"""A run that a cluster stops, and that is killed as soon as it has saved."""

import os
import signal


def die_after(trainer, step):
    """Have SIGTERM stop a trainer after a step, as a cluster does, and SIGKILL end its process when it has saved."""
    save, publish = trainer.save, trainer.publish

    def publish_then_stop():
        publish()
        if trainer.step == step:
            os.kill(os.getpid(), signal.SIGTERM)

    def save_then_die():
        save()
        os.kill(os.getpid(), signal.SIGKILL)

    trainer.publish, trainer.save = publish_then_stop, save_then_die
