"""Several engines on a virtual clock that share a router: messages, faults, hand-over of KV."""
