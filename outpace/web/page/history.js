// Snapshots of the last two minutes, and rates formed from their totals.

const KEPT_SECONDS = 120;

export class History {
  constructor() {
    this.snapshots = [];
  }

  add(snapshot) {
    const last = this.snapshots.at(-1);
    // After a restart of the server, its totals and its clock begin anew.
    if (last && (snapshot.clock < last.clock || snapshot.generated < last.generated)) this.snapshots = [];
    this.snapshots.push(snapshot);
    while (snapshot.clock - this.snapshots[0].clock > KEPT_SECONDS) this.snapshots.shift();
  }

  get latest() {
    return this.snapshots.at(-1);
  }

  /** The oldest snapshot of the last so many seconds. */
  before(seconds, than = this.latest) {
    return this.snapshots.find((each) => than.clock - each.clock <= seconds) ?? than;
  }

  /** `of(earlier, later)` for every snapshot, each against one about a second older. */
  series(of, count = 96) {
    const recent = this.snapshots.slice(-count);
    let at = 0;
    return recent.map((later) => {
      while (at + 1 < recent.length && recent[at + 1].clock <= later.clock - 1) at++;
      const earlier = recent[at] === later ? this.before(2, later) : recent[at];
      return earlier === later ? null : of(earlier, later);
    });
  }
}

export const rate = (name) => (earlier, later) => (later[name] - earlier[name]) / (later.clock - earlier.clock);

/** Speed over plain decoding between two snapshots; null where too little was decoded to say. */
export function speedup(earlier, later) {
  const spent = later.spent - earlier.spent;
  const plain = later.plain - earlier.plain;
  return spent > 0.02 && plain > 0 ? plain / spent : null;
}

export function drafted(earlier, later) {
  const total = (snapshot, place) => Object.values(snapshot.methods).reduce((sum, counts) => sum + counts[place], 0);
  return { drafted: total(later, 1) - total(earlier, 1), accepted: total(later, 2) - total(earlier, 2) };
}
