//! Bulk copies of boxes to shared memory, which arrive as late as possible: when a thread cannot continue
//! without them.

use super::arithmetic::tf32;
use super::cluster::{self, Sent};
use super::{Block, FENCED, Memory, Operand, Space, Stop, Thread};
use std::collections::BTreeMap;
use std::ops::Range;
use tilewright_ir::Program;
use tilewright_ir::gpu::bulk::TFLOAT32;

/// Operations on an mbarrier, which counts arrivals and bytes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Barriers {
    Init,
    Expect,
    Arrive,
    /// Arrives at an mbarrier of a block of the cluster.
    ArriveThere,
    /// Tests whether a phase is complete.
    Try,
}

#[derive(Clone, Debug, Default)]
struct Barrier {
    /// Number of arrivals of a phase, and of remaining ones.
    arrivals: u64,
    left: u64,
    /// Threads that have arrived in this phase.
    arrived: Vec<u32>,
    /// Writes fenced by the arrived threads: thread, position and bytes of each.
    written: Vec<(u32, usize, usize)>,
    /// Number of expected bytes.
    bytes: i64,
    /// Number of completed phases.
    phase: u64,
    /// Thread that initialized the mbarrier, until its fence.
    maker: Option<u32>,
    /// Whether the initializing thread has not yet fenced it for other blocks.
    is_unannounced: bool,
    made_by: u32,
}

/// Box copy in flight.
#[derive(Clone)]
pub struct Coming {
    /// Position of the mbarrier that counts the bytes.
    barrier: usize,
    /// Range of the destination.
    places: Range<usize>,
    /// Positions and bytes.
    parts: Vec<(usize, Vec<u8>)>,
}

/// Bulk copies in flight to a block, and its mbarriers.
#[derive(Default)]
pub struct Boxes {
    barriers: BTreeMap<usize, Barrier>,
    coming: Vec<Coming>,
    /// Mbarrier and number of the phase after which other threads see writes, for each 16 bytes.
    pub released: BTreeMap<usize, (usize, u64)>,
    n_changes: u64,
    n_seen: u64,
}

impl Boxes {
    /// Whether the state has changed since the last call.
    pub fn have_changed(&mut self) -> bool {
        std::mem::replace(&mut self.n_seen, self.n_changes) != self.n_changes
    }

    /// Whether a copy to some of these bytes is in flight.
    pub fn are_coming(&self, place: usize, n: usize) -> bool {
        let meets = |(to, bytes): &(usize, Vec<u8>)| *to < place + n && place < to + bytes.len();
        let near = self.coming.iter().filter(|c| c.places.start < place + n && place < c.places.end);
        near.flat_map(|c| &c.parts).any(meets)
    }

    /// Requires that no copy is pending and no mbarrier is in the middle of a phase.
    pub fn require_rest(&self) -> Result<(), String> {
        if !self.coming.is_empty() {
            return Err("boxes are still on their way at the end".into());
        }
        match self.barriers.iter().find(|(_, barrier)| barrier.left != barrier.arrivals || barrier.bytes != 0) {
            Some((at, barrier)) => Err(format!("at the end a phase of the barrier at {at} has begun: {barrier:?}")),
            None => Ok(()),
        }
    }

    /// Makes the mbarriers that a thread initialized visible to copies.
    pub fn fence(&mut self, thread: u32) {
        self.barriers.values_mut().filter(|b| b.maker == Some(thread)).for_each(|b| b.maker = None);
    }

    /// Makes the mbarriers that a thread initialized visible to other blocks.
    pub fn announce(&mut self, thread: u32) {
        self.barriers.values_mut().filter(|b| b.made_by == thread).for_each(|b| b.is_unannounced = false);
    }

    fn barrier(&mut self, at: usize) -> Result<&mut Barrier, String> {
        self.n_changes += 1;
        self.barriers.get_mut(&at).ok_or_else(|| format!("there is no barrier at {at}"))
    }

    /// Mbarrier of this block as seen from another block.
    fn barrier_from_afar(&mut self, at: usize) -> Result<&mut Barrier, String> {
        let barrier = self.barrier(at)?;
        match barrier.is_unannounced {
            true => Err("no fence for other blocks stands behind the making of the barrier".into()),
            false => Ok(barrier),
        }
    }
}

impl Barrier {
    /// Counts the arrival of a thread.
    fn arrive(&mut self, who: u32) -> Result<(), String> {
        if self.arrived.contains(&who) {
            return Err("the thread has arrived in this phase before".into());
        }
        self.arrived.push(who);
        self.left = self.left.checked_sub(1).ok_or("one arrival too many")?;
        self.end();
        Ok(())
    }

    fn end(&mut self) {
        if self.left == 0 && self.bytes == 0 {
            self.phase += 1;
            self.left = self.arrivals;
            self.arrived.clear();
        }
    }
}

/// Tensor map, in the emulator's own encoding: address, kind, extents, strides in bytes of all dimensions but
/// the first, extents of a box; innermost dimension first.
#[derive(Clone, Debug, PartialEq)]
pub struct Map {
    pub address: u64,
    pub element_bytes: u64,
    pub swizzled: bool,
    /// Whether the copy rounds f32 to TF32.
    pub rounds: bool,
    pub extents: Vec<u64>,
    pub strides: Vec<u64>,
    pub box_extents: Vec<u64>,
}

impl Map {
    /// Creates the emulator's form of a kernel's tensor map.
    pub fn of(program: &Program, map: &tilewright_ir::gpu::bulk::TensorMap, address: u64) -> Map {
        let array = program.buffer(map.array);
        let element_bytes = array.dtype.bytes();
        let rounds = map.described(program).kind == TFLOAT32;
        let reversed = |all: &[i64]| all.iter().rev().map(|n| *n as u64).collect::<Vec<_>>();
        let strides = array.strides().iter().rev().skip(1).map(|n| *n as u64 * element_bytes).collect();
        let (extents, box_extents) = (reversed(&array.shape), reversed(&map.extents));
        Map { address, element_bytes, swizzled: map.swizzled, rounds, extents, strides, box_extents }
    }

    pub fn words(&self) -> [u64; 16] {
        let rank = self.extents.len();
        let mut words = [0; 16];
        words[0] = self.address;
        words[1] =
            rank as u64 | self.element_bytes << 8 | u64::from(self.swizzled) << 16 | u64::from(self.rounds) << 17;
        words[2..2 + rank].copy_from_slice(&self.extents);
        words[7..7 + self.strides.len()].copy_from_slice(&self.strides);
        words[11..11 + rank].copy_from_slice(&self.box_extents);
        words
    }

    pub fn read(words: &[u64]) -> Map {
        let rank = (words[1] & 0xff) as usize;
        Map {
            address: words[0],
            element_bytes: words[1] >> 8 & 0xff,
            swizzled: words[1] >> 16 & 1 != 0,
            rounds: words[1] >> 17 & 1 != 0,
            extents: words[2..2 + rank].to_vec(),
            strides: words[7..6 + rank].to_vec(),
            box_extents: words[11..11 + rank].to_vec(),
        }
    }

    /// Stores the map in memory, and returns its address.
    pub fn pass(&self, memory: &mut Memory) -> u64 {
        memory.add(self.words().iter().flat_map(|word| word.to_le_bytes()).collect())
    }
}

impl Block<'_> {
    pub fn barriers(&mut self, t: &mut Thread, what: Barriers, x: &[Operand]) -> Result<(), String> {
        use Barriers::{Arrive, ArriveThere, Expect, Init, Try};
        let place = if matches!(what, Arrive | ArriveThere | Try) { &x[1] } else { &x[0] };
        let address = self.address(t, place)?;
        let me = self.number(t);
        if what == ArriveThere {
            let (rank, at) = cluster::of_address(address);
            self.sent.push((rank, Sent::Arrival { at, who: cluster::BLOCK * self.rank() + me }));
            return Ok(());
        }
        let at = self.position(address)?;
        match what {
            Init => {
                self.bytes(t, Space::Shared, address, 8)?;
                let (arrivals, maker) = (self.value(t, &x[1]), Some(me));
                let (is_unannounced, made_by) = (true, me);
                let barrier =
                    Barrier { arrivals, left: arrivals, maker, is_unannounced, made_by, ..Barrier::default() };
                self.boxes.barriers.insert(at, barrier);
            }
            Expect => {
                let bytes = self.value(t, &x[1]) as i64;
                self.boxes.barrier(at)?.bytes += bytes;
            }
            Arrive | ArriveThere => {
                let who = cluster::BLOCK * self.rank() + me;
                let barrier = self.boxes.barrier(at)?;
                barrier.written.extend(std::mem::take(&mut t.unreleased).into_iter().map(|(to, n)| (me, to, n)));
                barrier.arrive(who)?;
                self.release(at);
            }
            Try => {
                let parity = self.value(t, &x[2]);
                let is_over = |block: &Self| match block.boxes.barriers.get(&at) {
                    Some(barrier) => Ok(barrier.phase & 1 != parity),
                    None => Err(format!("there is no barrier at {at}")),
                };
                if !is_over(self)? {
                    self.land(at)?;
                }
                let is_there = is_over(self)?;
                if let (true, Some(barrier)) = (is_there, self.boxes.barriers.get(&at)) {
                    t.seen.insert(at, barrier.phase);
                }
                Self::set(t, &x[0], is_there.into());
                if !is_there {
                    t.stop = Some(Stop::Again);
                }
            }
        }
        Ok(())
    }

    /// Makes the writes of threads before their arrival at an mbarrier visible to the threads that wait for
    /// the completed phase.
    fn release(&mut self, at: usize) {
        let barrier = self.boxes.barriers.get_mut(&at).filter(|barrier| barrier.arrived.is_empty());
        let Some(Barrier { written, phase, .. }) = barrier else { return };
        for (who, to, n) in std::mem::take(written) {
            let is_own = |writer: &&mut u32| **writer == who | FENCED;
            self.writers[to..to + n].iter_mut().filter(is_own).for_each(|writer| *writer = 0);
            self.boxes.released.extend((to / 16..(to + n).div_ceil(16)).map(|unit| (unit, (at, *phase))));
        }
    }

    /// Applies an effect of another block of the cluster on this one.
    pub fn receive(&mut self, sent: Sent) -> Result<(), String> {
        if self.is_over {
            return Err("another block of the cluster wants something of one that is over".into());
        }
        match sent {
            Sent::Arrival { at, who } => self.boxes.barrier_from_afar(at)?.arrive(who),
            Sent::Box(coming) => {
                self.boxes.barrier_from_afar(coming.barrier)?;
                self.accept(coming)
            }
        }
    }

    /// Starts the copy of a box to this block.
    fn accept(&mut self, coming: Coming) -> Result<(), String> {
        let Coming { barrier, places, parts } = &coming;
        if self.boxes.are_coming(places.start, places.len()) {
            return Err(format!("another box is on its way to {}", places.start));
        }
        for (place, _) in parts {
            if self.groups.iter().any(|group| group.read(*place)) {
                return Err(format!("a product on its way reads what comes to {place}"));
            }
        }
        if self.boxes.barrier(*barrier)?.maker.is_some() {
            return Err("no fence stands behind the making of the barrier".into());
        }
        self.boxes.coming.push(coming);
        Ok(())
    }

    /// Completes the box copies that an mbarrier counts.
    fn land(&mut self, barrier: usize) -> Result<(), String> {
        let coming = std::mem::take(&mut self.boxes.coming);
        let (here, others): (Vec<Coming>, Vec<Coming>) = coming.into_iter().partition(|c| c.barrier == barrier);
        self.boxes.coming = others;
        for Coming { parts, .. } in here {
            let mut n = 0;
            for (to, bytes) in parts {
                self.shared[to..to + bytes.len()].copy_from_slice(&bytes);
                // The async proxy sees the data of asynchronous copies without a fence.
                self.writers[to..to + bytes.len()].fill(0);
                self.boxes.released.remove(&(to / 16));
                n += bytes.len() as i64;
            }
            let barrier = self.boxes.barrier(barrier)?;
            barrier.bytes -= n;
            barrier.end();
        }
        self.release(barrier);
        Ok(())
    }

    pub fn begin_box(&mut self, t: &mut Thread, (n, is_multicast): (usize, bool), x: &[Operand]) -> Result<(), String> {
        let [to, Operand::In(map, coordinates), barrier, mask @ ..] = x else { return Err("operands".into()) };
        let mask = match (is_multicast, mask) {
            (false, []) => 1 << self.rank(),
            (true, [mask]) => self.value(t, mask),
            _ => return Err("operands".into()),
        };
        let (to, barrier) = (self.address(t, to)?, self.address(t, barrier)?);
        let [to, barrier] = [self.position(to)? as u64, self.position(barrier)? as u64];
        let barrier = barrier as usize;
        let map = self.value(t, map);
        let words = self.memory.at(map, 128).ok_or("an array is told of nowhere")?;
        let words: Vec<u64> = words.chunks(8).map(|w| u64::from_le_bytes(w.try_into().expect("8 bytes"))).collect();
        let map = Map::read(&words);
        let first: Vec<i64> = coordinates.iter().map(|c| i64::from(self.value(t, c) as u32 as i32)).collect();
        if map.extents.len() != n || first.len() != n {
            return Err(format!("{} coordinates in an array of {} dimensions", first.len(), map.extents.len()));
        }
        let whole = if map.swizzled { 1024 } else { 128 };
        let row = map.box_extents[0] * map.element_bytes;
        let is_large = map.swizzled && row > 128 || map.box_extents.iter().any(|n| *n > 256);
        if to % whole != 0 || !row.is_multiple_of(16) || is_large {
            return Err(format!("a box of {:?} for {to}", map.box_extents));
        }
        if map.strides.iter().chain([&map.address]).any(|place| !place.is_multiple_of(16)) {
            return Err("the rows of an array do not begin at multiples of 16 bytes".into());
        }
        let n_rows: u64 = map.box_extents[1..].iter().product();
        let places = to as usize..(to + n_rows * row) as usize;
        let mut parts = Vec::new();
        for number in 0..n_rows {
            let (mut rest, mut from, mut is_inside) = (number, map.address, true);
            for (d, first) in first.iter().enumerate().skip(1) {
                let at = first + (rest % map.box_extents[d]) as i64;
                rest /= map.box_extents[d];
                is_inside &= (0..map.extents[d] as i64).contains(&at);
                from = from.wrapping_add_signed(at * map.strides[d - 1] as i64);
            }
            let mut bytes = Vec::new();
            for e in 0..map.box_extents[0] as i64 {
                let at = first[0] + e;
                let element = map.element_bytes as usize;
                if is_inside && (0..map.extents[0] as i64).contains(&at) {
                    let from = from.wrapping_add_signed(at * map.element_bytes as i64);
                    let place = bytes.len();
                    bytes.extend_from_slice(self.memory.at(from, element).ok_or("an array is not in memory")?);
                    if map.rounds {
                        let word = u32::from_le_bytes(bytes[place..].try_into().map_err(|_| "TF32 of four bytes")?);
                        bytes[place..].copy_from_slice(&tf32(word).to_le_bytes());
                    }
                } else {
                    bytes.extend(std::iter::repeat_n(0, element));
                }
            }
            for (part, bytes) in bytes.chunks(16).enumerate() {
                let address = to + number * row + 16 * part as u64;
                let swizzled = if map.swizzled { address ^ (address >> 7 & 7) << 4 } else { address };
                self.bytes(t, Space::Shared, self.window + swizzled, 16)?;
                parts.push((swizzled as usize, bytes.to_vec()));
            }
        }
        let coming = Coming { barrier, places, parts };
        for rank in (0..u64::BITS as usize).filter(|rank| mask >> rank & 1 != 0) {
            match rank == self.rank() as usize {
                true => self.accept(coming.clone())?,
                false => self.sent.push((rank, Sent::Box(coming.clone()))),
            }
        }
        Ok(())
    }
}
