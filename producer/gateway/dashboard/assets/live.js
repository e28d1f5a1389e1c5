// One stream of events a viewer; what it tells replaces texts in place, so that nothing jumps.
export function live(address) {}
