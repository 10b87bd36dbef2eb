//! Packed, register-tiled matrix product as a lowered program.

use super::*;

/// `C[m, n] = A[m, k] · B[k, n]` in tiles.
#[derive(Clone, Copy, Debug)]
pub struct Gemm {
    pub dtype: DType,
    pub m: i64,
    pub n: i64,
    pub k: i64,
    /// Register tile: rows, vectors, lanes per vector.
    pub mr: i64,
    pub nv: i64,
    pub lanes: i64,
    /// Number of steps of k in the innermost loop's body.
    pub ku: i64,
    /// Cache blocks; each must divide its size.
    pub mc: i64,
    pub kc: i64,
    pub nc: i64,
    /// Layout of A: panels `[m/mr, k, mr]`, copied rows `[m, k]`, or no copy.
    pub a: ALayout,
    /// Whether B is packed in the prepare part.
    pub prepacked: bool,
    /// Whether blocks of rows are distributed over threads.
    pub parallel: bool,
    /// Number of steps of k by which B is prefetched ahead.
    pub prefetch: i64,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ALayout {
    Panels,
    Rows,
    Plain,
}

impl Default for Gemm {
    fn default() -> Gemm {
        Gemm {
            dtype: DType::F32,
            m: 96,
            n: 96,
            k: 64,
            mr: 8,
            nv: 3,
            lanes: 16,
            ku: 4,
            mc: 48,
            kc: 32,
            nc: 48,
            a: ALayout::Panels,
            prepacked: false,
            parallel: false,
            prefetch: 0,
        }
    }
}

impl Gemm {
    pub fn program(&self) -> Program {
        let Gemm { dtype, m, n, k, mr, nv, lanes, ku, mc, kc, nc, a: a_layout, prepacked, parallel, prefetch } = *self;
        let nr = nv * lanes;
        for (whole, part) in [(m, mc), (mc, mr), (n, nc), (nc, nr), (k, kc), (kc, ku)] {
            assert_eq!(whole % part, 0, "{whole} % {part} in {self:?}");
        }
        let mut p = program(&format!("gemm {m}x{n}x{k} tile {mr}x{nr} ku {ku} {a_layout:?}"));
        let a = input(&mut p, "A", dtype, &[m, k]);
        let b =
            buffer(&mut p, "B", dtype, &[k, n], Scope::Global, if prepacked { Role::ConstInput } else { Role::Input });
        let c = output(&mut p, "C", dtype, &[m, n]);
        let role = if prepacked { Role::Kept } else { Role::Temporary };
        let bp = buffer(&mut p, "Bp", dtype, &[n / nr, k, nr], Scope::Global, role);
        let ap_shape = if a_layout == ALayout::Panels { vec![mc / mr, kc, mr] } else { vec![mc, kc] };
        let ap = temporary(&mut p, "Ap", dtype, &ap_shape, Scope::Local);
        let r = temporary(&mut p, "R", dtype, &[mr, nv, lanes], Scope::Register);
        let mut var = |name: &str| p.add_loop(name);

        let (jp, kk, pv, pl) = (var("pack_j"), var("pack_k"), var("pack_v"), var("pack_lane"));
        let pack_j = times(nr, jp).add(&times(lanes, pv)).add(&ix(pl));
        let pack_b = for_(
            jp,
            n / nr,
            vec![for_(
                kk,
                k,
                vec![unrolled(
                    pv,
                    nv,
                    vec![vector(
                        pl,
                        lanes,
                        vec![store(bp, &[ix(jp), ix(kk), times(lanes, pv).add(&ix(pl))], load(b, &[ix(kk), pack_j]))],
                    )],
                )],
            )],
        );

        let (ic, pc, jc, ip, jr) = (var("ic"), var("pc"), var("jc"), var("ip"), var("jr"));
        let (ai, ak, al, ar) = (var("a_i"), var("a_k"), var("a_lane"), var("a_row"));
        let a_lanes = lanes.min(kc);
        let row = |i: &Index| times(mc, ic).add(i);
        let depth = |i: &Index| times(kc, pc).add(i);
        let a_k = times(a_lanes, ak).add(&ix(al));
        assert_eq!(kc % a_lanes, 0);
        let pack_a = match a_layout {
            ALayout::Panels => for_(
                ai,
                mc / mr,
                vec![for_(
                    ak,
                    kc / a_lanes,
                    vec![vector(
                        al,
                        a_lanes,
                        (0..mr)
                            .map(|i| {
                                let at = row(&times(mr, ai).offset(i));
                                store(ap, &[ix(ai), a_k.clone(), ix(i)], load(a, &[at, depth(&a_k)]))
                            })
                            .collect(),
                    )],
                )],
            ),
            ALayout::Rows => for_(
                ai,
                mc,
                vec![for_(
                    ak,
                    kc / a_lanes,
                    vec![vector(
                        al,
                        a_lanes,
                        vec![store(ap, &[ix(ai), a_k.clone()], load(a, &[row(&ix(ai)), depth(&a_k)]))],
                    )],
                )],
            ),
            ALayout::Plain => for_(ar, 0, vec![]),
        };

        let (ko, kv, ri, rv, rl) = (var("ko"), var("kv"), var("ri"), var("rv"), var("rl"));
        let tile = |body: Stmt| unrolled(ri, mr, vec![unrolled(rv, nv, vec![vector(rl, lanes, vec![body])])]);
        let in_tile = [ix(ri), ix(rv), ix(rl)];
        let c_at =
            [row(&times(mr, ip).add(&ix(ri))), times(nc, jc).add(&times(nr, jr)).add(&times(lanes, rv)).add(&ix(rl))];
        let k_at = times(ku, ko).add(&ix(kv));
        let a_at = match a_layout {
            ALayout::Panels => load(ap, &[ix(ip), k_at.clone(), ix(ri)]),
            ALayout::Rows => load(ap, &[times(mr, ip).add(&ix(ri)), k_at.clone()]),
            ALayout::Plain => load(a, &[row(&times(mr, ip).add(&ix(ri))), depth(&k_at)]),
        };
        let panel = times(nc / nr, jc).add(&ix(jr));
        let b_at = |k: &Index| [panel.clone(), depth(k), times(lanes, rv).add(&ix(rl))];
        let mut k_body = Vec::new();
        if prefetch > 0 {
            let ahead = [panel.clone(), depth(&k_at.offset(prefetch)), times(lanes, rv)];
            k_body.push(unrolled(rv, nv, vec![Stmt::Prefetch { buffer: bp, index: ahead.to_vec(), for_write: false }]));
        }
        k_body.push(tile(add_to(r, &in_tile, mul(a_at, load(bp, &b_at(&k_at))), never())));
        let micro = vec![
            Stmt::Alloc(r),
            tile(store(r, &in_tile, Expr::Const(0.0))),
            for_(ko, kc / ku, vec![unrolled(kv, ku, k_body)]),
            tile(add_to(c, &c_at, load(r, &in_tile), Cond::Eq(ix(pc), ix(0)))),
        ];
        let kind = if parallel { LoopKind::Parallel } else { LoopKind::Serial };
        let blocks = for_kind(
            kind,
            ic,
            m / mc,
            vec![for_(
                pc,
                k / kc,
                vec![
                    Stmt::Alloc(ap),
                    pack_a,
                    for_(jc, n / nc, vec![for_(jr, nc / nr, vec![for_(ip, mc / mr, micro)])]),
                ],
            )],
        );
        if prepacked {
            p.prepare = vec![pack_b];
            p.body = vec![blocks];
        } else {
            p.body = vec![Stmt::Alloc(bp), pack_b, blocks];
        }
        p
    }

    /// Number of floating-point operations of one run.
    pub fn flops(&self) -> f64 {
        2.0 * (self.m * self.n * self.k) as f64
    }
}
