"""What was alive before a run is left alone by the collector; what comes later is not."""

import gc
import weakref

from rl4llm.core.garbage import set_aside_what_stays


class Node:
    pass


def cycle():
    node = Node()
    node.itself = node
    return weakref.ref(node)


def test_only_what_comes_later_is_gone_through_and_no_garbage_is_set_aside():
    kept, before = Node(), cycle()
    try:
        set_aside_what_stays()
        later = cycle()
        watched = gc.get_objects()
        assert before() is None and all(thing is not kept for thing in watched)
        assert any(thing is later() for thing in watched)
        del watched
        gc.collect()
        assert later() is None
    finally:
        gc.unfreeze()
