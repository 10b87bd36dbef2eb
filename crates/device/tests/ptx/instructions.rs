//! Instructions and resources of kernels, as NVIDIA's assembler makes them.

use nvidia::Assembled;

use super::*;

/// Assembles the kernel of a configuration for sm_90a; returns its resources and its disassembly.
fn assembled([ptxas, nvdisasm]: [&Path; 2], (task, config): (&Task, &Config), cubin: &Path) -> (Assembled, String) {
    let kernels = lower_gpu(&task.program(config).unwrap()).unwrap();
    let code = ptx(&kernels, task).unwrap();
    let made = nvidia::assemble(ptxas, code.as_bytes(), "sm_90a", cubin);
    let made = made.unwrap_or_else(|why| panic!("{}: {why}\n{code}", task.setting.workload))["run_0"];
    (made, nvidia::disassembled(nvdisasm, cubin))
}

/// Number of instructions that begin with a word.
fn n_of(opcodes: &[String], word: &str) -> usize {
    opcodes.iter().filter(|op| op.starts_with(word)).count()
}

/// The shortest loop with at least this many instructions that begin with a word.
fn shortest_with<'a>(loops: &'a [Vec<String>], word: &str, least: usize) -> &'a Vec<String> {
    let found = loops.iter().filter(|opcodes| n_of(opcodes, word) >= least).min_by_key(|opcodes| opcodes.len());
    found.unwrap_or_else(|| panic!("no {word} in {loops:#?}"))
}

/// Tiles of 64 × 64 per warp: nothing spills, an instruction multiplies a tile of 16 steps, and all operands
/// are loaded into registers as tiles.
#[test]
fn tensor_cores_of_halves_are_used_as_expected() {
    let (Some(ptxas), Some(nvdisasm)) = (nvidia::tool("ptxas"), nvidia::tool("nvdisasm")) else { return };
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("halves-ptx");
    std::fs::create_dir_all(&folder).unwrap();
    for (gpu, dtype) in ["sm_80", "sm_90a"].into_iter().flat_map(|gpu| ["bf16", "f16"].map(|dtype| (gpu, dtype))) {
        let task = tiles_task(&format!("matmul:m=4096,n=4096,k=4096,dtype={dtype}"), gpu);
        let config = task.space.config_from_json(&HALVES_OF_WARPS.parse().unwrap()).unwrap();
        let kernels = lower_gpu(&task.program(&config).unwrap()).unwrap();
        let cubin = folder.join(format!("{gpu}-{dtype}.cubin"));
        let text = ptx(&kernels, &task).unwrap();
        let made = nvidia::assemble(&ptxas, text.as_bytes(), gpu, &cubin).unwrap()["run_0"];
        let opcodes = nvidia::innermost_loop(&nvdisasm, &cubin);
        let n = |word: &str| opcodes.iter().filter(|opcode| opcode.starts_with(word)).count();
        println!("{gpu} {dtype}: {made:?}, {} instructions of which {} multiply tiles", opcodes.len(), n("HMMA.16816"));
        assert_eq!((made.spilled_bytes, made.local_bytes), (0, 0), "{gpu}: {made:?}");
        assert_eq!(n("HMMA.16816"), 2 * 4 * 8, "{gpu}: two times 16 steps, 4 x 8 tiles");
        assert_eq!(n("LDSM"), 2 * (4 + 8), "{gpu}: tiles of rows and of columns");
        assert!(!text.contains("ld.shared"), "{gpu}: no factor is loaded by itself");
        assert_eq!((n("LDGSTS"), n("LDG.")), (8, 0), "{gpu}: copies of 16 bytes");
        assert!(opcodes.len() < 3 * n("HMMA"), "{gpu}: {opcodes:?}");
    }
}

/// Tiles of 32 × 32 per warp: nothing spills, and one instruction multiplies a tile. (Tiles of 64 × 32, which
/// CUTLASS uses, leave no registers for sums that restart in each step.)
#[test]
fn tensor_cores_are_used_as_expected() {
    let (Some(ptxas), Some(nvdisasm)) = (nvidia::tool("ptxas"), nvidia::tool("nvdisasm")) else { return };
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("tiles-ptx");
    std::fs::create_dir_all(&folder).unwrap();
    for gpu in ["sm_80", "sm_90a"] {
        let workload = Workload::parse("matmul:m=4096,n=4096,k=4096").unwrap();
        let setting = TemplateSetting { workload, target: Target::named(gpu).unwrap(), n_threads: 1 };
        let task = Task::new(setting, Some("gpu-matmul-mma")).unwrap();
        let config = task.space.config_from_json(&TILES_OF_WARPS.parse().unwrap()).unwrap();
        let kernels = lower_gpu(&task.program(&config).unwrap()).unwrap();
        let cubin = folder.join(format!("{gpu}.cubin"));
        let made = nvidia::assemble(&ptxas, ptx(&kernels, &task).unwrap().as_bytes(), gpu, &cubin).unwrap()["run_0"];
        let opcodes = nvidia::innermost_loop(&nvdisasm, &cubin);
        let n = |word: &str| opcodes.iter().filter(|opcode| opcode.starts_with(word)).count();
        println!("{gpu}: {made:?}, {} instructions of which {} multiply tiles", opcodes.len(), n("HMMA"));
        assert_eq!((made.spilled_bytes, made.local_bytes), (0, 0), "{gpu}: {made:?}");
        assert_eq!(n("HMMA"), 3 * 4 * 8, "{gpu}: three products, four times eight steps, 2 x 4 tiles");
        assert_eq!((n("LDG.E.128"), n("LDG")), (6, 6), "{gpu}: loads of four at once");
        assert!(opcodes.len() < 6 * n("HMMA"), "{gpu}: {opcodes:?}");
    }
}

const TILES_OF_WARPS: &str = r#"{"block_m":128,"block_n":64,"block_k":32,"warp_m":32,"warp_n":32,"vector_a":4,
    "vector_b":4,"order":"groups","unroll_k":4,"ahead":0,"precision":"tf32x3"}"#;

#[test]
fn kernels_assemble_as_the_model_says() {
    let Some(ptxas) = nvidia::tool("ptxas") else { return };
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("random-ptx");
    std::fs::create_dir_all(&folder).unwrap();
    for gpu in gpus() {
        let (mut n_kernels, mut n_unmodelled, mut n_modelled, mut n_more) = (0, 0, 0, 0);
        let (mut spilling, mut above) = (Vec::new(), Vec::new());
        let cubin = folder.join(format!("{gpu}.cubin"));
        let mut times = [Vec::new(), Vec::new()];
        each(&[SHAPES.as_slice(), &LARGE].concat(), gpu, |_, task, config, kernels| {
            let start = Instant::now();
            let text = ptx(kernels, task)?;
            times[0].push(start.elapsed());
            let start = Instant::now();
            let made = nvidia::assemble(&ptxas, text.as_bytes(), gpu, &cubin);
            let made = made.map_err(|why| format!("{why}\n{text}"))?;
            times[1].push(start.elapsed());
            for kernel in kernels.kernels() {
                let made = made.get(&kernel.name).ok_or_else(|| format!("no {}", kernel.name))?;
                let most = task.setting.target.gpu.as_ref().map_or(0, |gpu| gpu.shared_bytes);
                let expected = Some(kernel.shared_bytes(kernels)).filter(|bytes| *bytes <= most).unwrap_or(0);
                if made.shared_bytes != expected {
                    return Err(format!("{} shares {} bytes, not {expected}", kernel.name, made.shared_bytes));
                }
                if !models_registers(task) {
                    n_unmodelled += usize::from(made.spilled_bytes > 0);
                    continue;
                }
                n_kernels += 1;
                let (name, json) = (task.template.name, task.space.config_to_json(config));
                let said = format!("{} of {} {name} {json}: {made:?}", kernel.name, task.setting.workload);
                if made.spilled_bytes > 0 {
                    spilling.push(said.clone());
                }
                // A kernel without tiles in shared memory is small.
                if kernel.shared.is_empty() {
                    continue;
                }
                let Some(modelled) = modelled_registers(task, config) else { continue };
                n_modelled += 1;
                if made.registers > modelled {
                    let capped = with_registers(&text, modelled);
                    let capped = nvidia::assemble(&ptxas, capped.as_bytes(), gpu, &cubin)?[&kernel.name];
                    n_more += 1;
                    above.extend(Some(format!("{said}, modelled {modelled}")).filter(|_| capped.spilled_bytes > 0));
                }
            }
            Ok(())
        });
        println!(
            "{gpu}: of {n_kernels} kernels with a model of registers {} spill; of {n_modelled} with tiles {n_more} \
             take more than it says, and {} need more; {n_unmodelled} others spill\n{}\nneed more:\n{}",
            spilling.len(),
            above.len(),
            spilling.join("\n"),
            above.join("\n")
        );
        times.iter_mut().for_each(|times| times.sort());
        let [llvm, ptxas] = times.map(|times| times[times.len() / 2]);
        println!("{gpu}: half of the candidates take LLVM {llvm:.1?} and ptxas {ptxas:.1?} at most");
        if n_configs().is_some() {
            assert!(50 * spilling.len() <= n_kernels, "{gpu}: {} of {n_kernels} spill", spilling.len());
            assert!(50 * n_more <= n_modelled, "{gpu}: {n_more} of {n_modelled} take more registers");
        }
    }
}

/// A group of warps multiplies 64 rows by 256 columns: four instructions for the 128 bytes of a row, nothing
/// spills, and no instruction waits for another.
#[test]
fn groups_of_warps_are_used_as_expected() {
    let (Some(ptxas), Some(nvdisasm)) = (nvidia::tool("ptxas"), nvidia::tool("nvdisasm")) else { return };
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("groups-ptx");
    std::fs::create_dir_all(&folder).unwrap();
    let boxes = GROUPS_OF_WARPS.replace("async", "bulk").replace(r#""vector_a":4"#, r#""vector_a":1"#);
    let both = boxes.replace(r#""vector_b":4"#, r#""vector_b":1"#);
    let of_halves = |config: &str| config.replace(r#""block_k":32"#, r#""block_k":64"#).replace("\":4", "\":8");
    let (boxes_of_halves, halves) = (of_halves(&both), of_halves(GROUPS_OF_WARPS));
    let of_registers =
        GROUPS_OF_WARPS.replace("\"ahead\":3,\"copies\":\"async\"", "\"ahead\":1,\"copies\":\"registers\"");
    let of_registers = of_registers.replace(r#""block_n":256"#, r#""block_n":128"#);
    let [in_flight, in_flight_of_halves] =
        [&both, &boxes_of_halves].map(|config| config.replace("\"copies\"", "\"in_flight\":1,\"copies\""));
    for (text, config, n_boxes) in [
        ("batch_matmul:b=1,m=4096,n=4096,k=4096,tb=1,tf32=1", &of_registers, 0),
        ("matmul:m=4096,n=4096,k=4096,tf32=1", &of_registers, 0),
        ("dense:m=4096,n=4096,k=4096,tf32=1", &both, 2),
        ("matmul:m=4096,n=4096,k=4096,dtype=bf16", &halves, 0),
        ("dense:m=4096,n=4096,k=4096,dtype=f16", &boxes_of_halves, 2),
        ("dense:m=4096,n=4096,k=4096", &of_registers, 0),
        ("dense:m=4096,n=4096,k=4096,tf32=1", &in_flight, 2),
        ("batch_matmul:b=1,m=4096,n=4096,k=4096,ta=1,dtype=f16", &in_flight_of_halves, 2 + 4),
        // 256 columns are four swizzled rows if they lie across the sum.
        ("matmul:m=4096,n=4096,k=4096,dtype=bf16", &boxes_of_halves, 1 + 4),
        ("batch_matmul:b=1,m=4096,n=4096,k=4096,ta=1,dtype=f16", &boxes_of_halves, 2 + 4),
    ] {
        // Numbers in two parts need three products.
        let in_parts = !text.contains("tf32=1") && !text.contains("dtype");
        let n_products = if in_parts { 3 * 4 } else { 4 };
        let task = groups_task(text, UNITS);
        let config = task.space.config_from_json(&config.parse().unwrap()).unwrap();
        let kernels = lower_gpu(&task.program(&config).unwrap()).unwrap();
        let cubin = folder.join("groups.cubin");
        let made =
            nvidia::assemble(&ptxas, ptx(&kernels, &task).unwrap().as_bytes(), "sm_90a", &cubin).unwrap()["run_0"];
        let opcodes = nvidia::innermost_loop(&nvdisasm, &cubin);
        let n = |word: &str| opcodes.iter().filter(|opcode| opcode.starts_with(word)).count();
        println!("{text}: {made:?}, {} instructions of which {} multiply tiles", opcodes.len(), n("HGMMA"));
        assert_eq!((made.spilled_bytes, made.local_bytes), (0, 0), "{text}: {made:?}");
        assert!(made.registers <= 240, "{text}: {made:?}");
        assert_eq!((n("HGMMA"), n("UTMALDG")), (n_products, n_boxes), "{text}: {opcodes:?}");
    }
}

/// With a producer warp, consumer warps only multiply and wait for no other warps: a loop of bulk copies and
/// a loop of products, neither with a barrier of the block.
#[test]
fn a_warp_that_copies_is_used_as_expected() {
    let (Some(ptxas), Some(nvdisasm)) = (nvidia::tool("ptxas"), nvidia::tool("nvdisasm")) else { return };
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("fed-ptx");
    std::fs::create_dir_all(&folder).unwrap();
    for (text, sizes, in_flight, [persistent, cluster, teams], n_boxes, most_registers) in [
        ("dense:m=4096,n=4096,k=4096,tf32=1", "128,256,32,2", 1, [0, 1, 1], 2, 224),
        ("matmul:m=4096,n=4096,k=4096,dtype=bf16", "128,256,64,2", 1, [1, 1, 1], 1 + 4, 224),
        ("dense:m=4096,n=4096,k=4096,dtype=f16", "256,128,64,4", 0, [1, 1, 1], 2, 120),
        ("batch_matmul:b=1,m=4096,n=4096,k=4096,ta=1,dtype=f16", "64,256,64,1", 0, [0, 1, 1], 1 + 4, 255),
        ("dense:m=4096,n=4096,k=4096,tf32=1", "128,256,32,2", 1, [1, 2, 1], 2, 224),
        ("matmul:m=4096,n=4096,k=4096,dtype=bf16", "128,256,64,2", 1, [1, 2, 1], 1 + 4, 224),
        // Threads load the operand of rows.
        ("matmul:m=4096,n=4096,k=4096,tf32=1", "128,192,32,2", 0, [1, 1, 1], 1 + 4, 168),
        ("matmul:m=4096,n=4096,k=4096,tf32=1", "128,128,32,1", 0, [1, 1, 1], 1 + 4, 224),
        // Two teams take tiles in turns.
        ("matmul:m=4096,n=4096,k=4096,dtype=bf16", "64,256,64,1", 1, [1, 1, 2], 1 + 4, 168),
    ] {
        let [block_m, block_n, block_k, groups] =
            sizes.split(',').collect::<Vec<_>>().try_into().expect("four numbers");
        let config = format!(
            r#"{{"block_m":{block_m},"block_n":{block_n},"block_k":{block_k},"groups_m":{groups},"groups_n":1,
                "vector_a":1,"vector_b":1,"order":"rows","ahead":4,"copies":"bulk","in_flight":{in_flight},
                "producer":1,"persistent":{persistent},"cluster":{cluster},
                "teams":{teams}}}"#
        );
        let is_of_clusters_of_halves = cluster > 1 && text.contains("dtype");
        let config_text = if is_of_clusters_of_halves {
            config.replace("\"copies\"", "\"store\":\"exchanged\",\"copies\"")
        } else {
            config
        };
        let task = groups_task(text, UNITS);
        let config = task.space.config_from_json(&config_text.parse().unwrap()).unwrap();
        let (made, text_of) = assembled([&ptxas, &nvdisasm], (&task, &config), &folder.join("fed.cubin"));
        let all = nvidia::loops(&text_of);
        // Each box also has a loop over threads that request another box, of which there are none.
        let [products, boxes] =
            [("HGMMA", 4), ("UTMALDG", n_boxes)].map(|(word, least)| shortest_with(&all, word, least));
        println!(
            "{text} in_flight={in_flight} persistent={persistent} cluster={cluster} teams={teams}: {made:?}, {} and {} \
             instructions",
            products.len(),
            boxes.len()
        );
        assert_eq!((made.spilled_bytes, made.local_bytes), (0, 0), "{text}: {made:?}");
        assert!(made.registers <= most_registers, "{text}: {made:?}");
        let counts = ["HGMMA", "UTMALDG", "BAR"];
        let [rows, groups] = [block_m, groups].map(|n| n.parse::<usize>().expect("a number"));
        let n_sets = rows / 64 / groups;
        assert_eq!(counts.map(|word| n_of(products, word)), [4 * n_sets, 0, 0], "{text}: {products:?}");
        let n_loaded = if text.starts_with("matmul") && text.contains("tf32") { 4 * 4 * n_sets } else { 0 };
        assert_eq!(n_of(products, "LDS"), n_loaded, "{text}: {products:?}");
        assert_eq!(counts.map(|word| n_of(boxes, word)), [0, n_boxes, 0], "{text}: {boxes:?}");
        // 16-bit floats are stored 16 bytes at a time: 256 columns of two rows per thread.
        let n_stores = ["STG.E.128", "STG.E ", "SHFL.BFLY"].map(|word| text_of.matches(word).count());
        let is_exchanged = config_text.contains("exchanged");
        assert!(!is_exchanged || n_stores == [16, 0, 64], "{text}: {n_stores:?}");
        // In row order, blocks share the boxes of the first operand.
        let n_multicast = boxes.iter().filter(|op| op.starts_with("UTMALDG") && op.contains("MULTICAST")).count();
        assert_eq!(n_multicast, usize::from(cluster > 1), "{text}: {boxes:?}");
    }
}

/// Converter warps load and store 16 bytes at a time and wait for no other warps; consumers have three
/// products of parts for each 8 steps, no conversion, and the registers that 12 warps leave.
#[test]
fn warps_that_convert_are_used_as_expected() {
    let (Some(ptxas), Some(nvdisasm)) = (nvidia::tool("ptxas"), nvidia::tool("nvdisasm")) else { return };
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("converted-ptx");
    std::fs::create_dir_all(&folder).unwrap();
    for ([block_m, block_n, groups], ahead, [persistent, cluster], store) in [
        ([128, 128, 2], 3, [0, 1], "direct"),
        ([128, 128, 2], 3, [1, 1], "direct"),
        ([128, 128, 2], 2, [1, 2], "bulk"),
        ([64, 128, 1], 4, [1, 1], "direct"),
        ([128, 96, 2], 3, [1, 1], "direct"),
    ] {
        let task = groups_task("dense:m=4096,n=4096,k=4096", UNITS);
        let config = format!(
            r#"{{"block_m":{block_m},"block_n":{block_n},"block_k":32,"groups_m":{groups},"groups_n":1,"vector_a":1,
            "vector_b":1,"order":"rows","ahead":{ahead},"copies":"bulk","producer":1,"persistent":{persistent},
            "cluster":{cluster},"store":"{store}"}}"#
        );
        let config = task.space.config_from_json(&config.parse().unwrap()).unwrap();
        assert!(task.space.violated(&config).is_none(), "{block_m} {block_n}: {:?}", task.space.violated(&config));
        let (made, text_of) = assembled([&ptxas, &nvdisasm], (&task, &config), &folder.join("converted.cubin"));
        let all = nvidia::loops(&text_of);
        let [products, converted, boxes] = ["HGMMA", "LDS", "UTMALDG"].map(|word| shortest_with(&all, word, 2));
        println!(
            "{block_m} {block_n} persistent={persistent} cluster={cluster} {store}: {made:?}, {}, {} and {} instructions",
            products.len(),
            converted.len(),
            boxes.len()
        );
        assert_eq!((made.spilled_bytes, made.local_bytes), (0, 0), "{made:?}");
        assert!(made.registers <= 168, "{made:?}");
        let words = ["HGMMA", "UTMALDG", "LDS.128", "STS.128", "BAR"];
        let n_chunks = (block_m + block_n) * 128 / 1024;
        assert_eq!(words.map(|word| n_of(products, word)), [3 * 4 * block_m / 64 / groups, 0, 0, 0, 0], "{products:?}");
        assert_eq!(words.map(|word| n_of(converted, word)), [0, 0, n_chunks, n_chunks, 0], "{converted:?}");
        assert_eq!(words.map(|word| n_of(boxes, word)), [0, 2, 0, 0, 0], "{boxes:?}");
    }
}

/// A warp stores a box by four instructions for tiles of 16-bit floats, or eight for pairs of f32, and one of
/// TMA; there are no other stores, and nothing spills.
#[test]
fn boxes_are_stored_as_expected() {
    let (Some(ptxas), Some(nvdisasm)) = (nvidia::tool("ptxas"), nvidia::tool("nvdisasm")) else { return };
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("stores-ptx");
    std::fs::create_dir_all(&folder).unwrap();
    for (text, [block_m, block_n, block_k, groups], ahead, cluster, most_registers) in [
        ("matmul:m=4096,n=4096,k=4096,dtype=bf16", [128, 256, 64, 2], 4, 1, 224),
        ("matmul:m=4096,n=4096,k=4096,dtype=bf16", [128, 256, 64, 2], 4, 2, 224),
        ("dense:m=4096,n=4096,k=4096,dtype=f16", [256, 128, 64, 4], 3, 1, 120),
        ("dense:m=4096,n=4096,k=4096,tf32=1", [128, 256, 32, 2], 4, 1, 224),
    ] {
        let task = groups_task(text, UNITS);
        let counted = |store: &str| {
            let config = format!(
                r#"{{"block_m":{block_m},"block_n":{block_n},"block_k":{block_k},"groups_m":{groups},"groups_n":1,
                "vector_a":1,"vector_b":1,"order":"groups","ahead":{ahead},"copies":"bulk","producer":1,
                "persistent":1,"cluster":{cluster},"store":"{store}"}}"#
            );
            let config = task.space.config_from_json(&config.parse().unwrap()).unwrap();
            assert!(task.space.violated(&config).is_none(), "{text} {store}");
            let (made, all) = assembled([&ptxas, &nvdisasm], (&task, &config), &folder.join("stores.cubin"));
            assert_eq!((made.spilled_bytes, made.local_bytes), (0, 0), "{text}: {made:?}");
            let words = ["UTMASTG", "STSM", "STS.64", " STG.E", "SHFL.BFLY", "WARPGROUP.DEPBAR", "HGMMA", ";"];
            (made.registers, words.map(|word| all.matches(word).count()))
        };
        let is_half = text.contains("dtype");
        let (registers, counts) = counted("bulk");
        let before = counted(if is_half { "exchanged" } else { "direct" });
        println!("{text} cluster={cluster}: {registers} registers, {counts:?}, without boxes {before:?}");
        let n_boxes = block_m / 64 / groups * block_n / if is_half { 64 } else { 32 };
        let expected = [n_boxes, if is_half { 4 * n_boxes } else { 0 }, if is_half { 0 } else { 8 * n_boxes }, 0, 0];
        assert_eq!(counts[..5], expected.map(|n| n as usize), "{text}: {counts:?}");
        assert_eq!(counts[5..7], before.1[5..7], "{text}: products are as they were");
        assert!(registers <= most_registers, "{text}: {registers}");
    }
}

const GROUPS_OF_WARPS: &str = r#"{"block_m":128,"block_n":256,"block_k":32,"groups_m":2,"groups_n":1,"vector_a":4,
    "vector_b":4,"order":"rows","ahead":3,"copies":"async"}"#;

/// Number of registers that the assembler uses, if available, beyond those that a kernel needs: it loads
/// ahead.
const SPARE: u64 = 48;

/// Number of registers per thread in the model of the constraint `registers`; `None` without such a
/// constraint.
fn modelled_registers(task: &Task, config: &Config) -> Option<u64> {
    let space = &task.space;
    let model = space.constraints().iter().find(|c| c.name == "registers" && !c.text.contains("where"))?;
    let model = model.text.split_once(" <= ").expect("it begins with the model's registers").0;
    let parameters: Vec<Parameter> =
        space.names().enumerate().map(|(at, name)| Parameter::new(name, space.domain(at).clone())).collect();
    let allows = |registers: &u64| {
        let bound = Constraint::parse("bound", &format!("{model} + {SPARE} >= {registers}"), &parameters).ok()?;
        let values: Vec<Value> = bound.parameters.iter().map(|name| space.value(config, name)).collect();
        Some(bound.holds(&values.iter().collect::<Vec<_>>()))
    };
    let all: Vec<u64> = (0..=MOST_REGISTERS).collect();
    let n_allowed = all.partition_point(|registers| allows(registers) == Some(true));
    n_allowed.checked_sub(1).map(|last| all[last])
}

/// Maximum number of registers per thread, on any GPU.
const MOST_REGISTERS: u64 = 255;

/// Code whose kernels are limited to `most` registers: they need no more if nothing spills.
fn with_registers(ptx: &str, most: u64) -> String {
    let any = ".minnctapersm 1";
    assert!(ptx.contains(any), "the assembler is left the choice");
    ptx.replace(any, &format!(".maxnreg {most}"))
}
