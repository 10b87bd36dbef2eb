//! Prints what `main.c` prints.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut context = decoder::Context::new(0)?;
    for length in [5, 40, 1] {
        let keys: Vec<f32> = (0..8 * length).map(|i| ((7 * i + length) % 11) as f32 / 8.0 - 0.5).collect();
        let states: Vec<f32> = (0..8 * length).map(|i| ((5 * i + length) % 13) as f32 / 8.0 - 0.5).collect();
        let seen: Vec<f32> = (0..length).map(|i| if i % 4 == 3 { 0.0 } else { 1.0 }).collect();
        context.rewind(0)?;
        context.set_dim("length", length)?;
        assert!(context.set_dim("length", 0).is_err() && context.set_dim("length", 41).is_err());
        let mut at = 0;
        for n in [3, 1, 1] {
            let ids: Vec<i64> = (at..at + n).map(|at| (3 * at + length) % 37).collect();
            let mut y = vec![0.0; 8 * ids.len()];
            context.set_dim("tokens", n)?;
            context.run(&ids, &keys, &states, &seen, &mut y)?;
            y.iter().for_each(|y| println!("{}", (1000.0 * y).round()));
            at += n;
        }
    }
    Ok(())
}
