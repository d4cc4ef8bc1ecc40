"""Several engines on a virtual clock, behind a router: messages, faults, hand-over of KV."""
