(* The output of coded attention: its distance from the real one.
   Used in docs/soundness.md under "Coded attention". *)

Require Import Certk.sums Certk.total_variation Certk.odds Certk.exponential Certk.gram_certificate.
Require Import Certk.value_gram Certk.coded_weights Certk.coded_groups.

(* The change of a group's weights, as a length. *)
Definition moved {key : Type} (g : group key) : R :=
  Rmin (largest g * errors g * (1 + growth (error g) * error g)) ((exp (error g) - 1) * sqrt (squared g)).

Lemma moved_bound {key : Type} (g : group key) (u x : key -> R) :
  (forall k, In k (members g) -> 0 <= u k <= largest g) ->
  (forall k, In k (members g) -> Rabs (x k) <= error g) -> 0 <= error g ->
  0 <= errors g -> total (members g) (fun k => x k * x k) <= errors g * errors g ->
  squares (members g) u <= squared g -> 0 < largest g ->
  norm (members g) (fun k => u k * (exp (x k) - 1)) <= moved g.
Proof.
  intros W B B0 X0 X S m. pose proof (growth_nonneg (error g)).
  assert (0 <= 1 + growth (error g) * error g) by nra.
  apply Rmin_glb.
  - apply Rle_trans with (norm (members g) (fun k => (largest g * (1 + growth (error g) * error g)) * Rabs (x k))).
    + apply norm_le. intros k I. specialize (W k I). rewrite Rabs_mult, Rabs_pos_eq by lra.
      pose proof (exp_minus_1_abs _ _ (B k I)). pose proof (Rabs_pos (x k)). pose proof (Rabs_pos (exp (x k) - 1)).
      apply Rle_trans with (largest g * (Rabs (x k) * (1 + growth (error g) * error g))); [|lra].
      apply Rmult_le_compat; lra.
    + rewrite norm_times by nra.
      replace (largest g * errors g * (1 + growth (error g) * error g))
        with (largest g * (1 + growth (error g) * error g) * errors g) by ring.
      apply Rmult_le_compat_l; [nra|]. apply norm_le_of_squares; [easy|].
      rewrite (total_ext _ _ (fun k => x k * x k)); [easy|].
      intros. rewrite <- Rabs_mult. apply Rabs_pos_eq, square_nonneg.
  - pose proof (exp_ge_line (error g)).
    apply Rle_trans with (norm (members g) (fun k => (exp (error g) - 1) * u k)).
    + apply norm_le. intros k I. specialize (W k I). rewrite Rabs_mult, Rabs_pos_eq by lra.
      pose proof (exp_minus_1_abs_le _ _ (B k I)). nra.
    + rewrite norm_times by lra. apply Rmult_le_compat_l; [lra|]. now apply sqrt_le_1_alt.
Qed.

Section Output.
Context {key entry : Type}.
Variable entries : list entry.
Variable scored : list key.
Variable groups : list (group key).
Let keys := scored ++ flat_map members groups.
Variables u x r flushed : key -> R.
Variables rho F : R.
Let w := real u x r flushed.

Hypothesis used : forall k, In k keys -> 0 <= u k.
Hypothesis exact : forall k, In k scored -> x k = 0.
Hypothesis described : forall g, In g groups -> describes u x g.
Hypothesis rounding : forall k, In k keys -> Rabs (r k) <= rho.
Hypothesis rho_nonneg : 0 <= rho.
Hypothesis lost : forall k, In k keys -> 0 <= flushed k.
Hypothesis lost_together : total keys flushed <= F.

(* N of the page. *)
Definition N := sqrt (total groups (fun g => moved g * moved g)).

(* The length of all changes of weights. *)
Lemma changes_length :
  norm keys (fun k => w k - u k) <= exp rho * N + (exp rho - 1) * norm keys u + F.
Proof.
  pose proof (exp_ge_1 rho rho_nonneg).
  apply Rle_trans with (norm keys (fun k =>
    (exp rho * Rabs (u k * (exp (x k) - 1)) + (exp rho - 1) * u k) + flushed k)).
  - apply norm_le. intros k I. specialize (used k I). specialize (lost k I).
    unfold w, real.
    replace (u k * exp (x k + r k) + flushed k - u k)
      with (exp (r k) * (u k * (exp (x k) - 1)) + (exp (r k) - 1) * u k + flushed k) by (rewrite exp_plus; ring).
    destruct (rounded keys r rho rounding k I). pose proof (exp_pos (r k)). pose proof (shrunk_ge rho).
    eapply Rle_trans; [apply Rabs_triang|]. rewrite (Rabs_pos_eq (flushed k)) by easy. apply Rplus_le_compat_r.
    eapply Rle_trans; [apply Rabs_triang|]. rewrite !(Rabs_mult (exp (r k))), (Rabs_mult _ (u k)).
    rewrite (Rabs_pos_eq (u k)), (Rabs_pos_eq (exp (r k))) by lra.
    apply Rplus_le_compat; apply Rmult_le_compat_r; try apply Rabs_pos; try lra. apply Rabs_le. lra.
  - eapply Rle_trans; [apply norm_plus|]. apply Rplus_le_compat.
    + eapply Rle_trans; [apply norm_plus|]. rewrite !norm_times by lra.
      apply Rplus_le_compat_r, Rmult_le_compat_l; [lra|]. unfold norm, N. apply sqrt_le_1_alt.
      rewrite (total_ext _ _ (fun k => u k * (exp (x k) - 1) * (u k * (exp (x k) - 1))))
        by (intros; rewrite <- Rabs_mult; apply Rabs_pos_eq, square_nonneg).
      unfold keys. rewrite over_groups by (intros k I; rewrite exact by easy; rewrite exp_0; ring).
      apply total_le. intros g I. destruct (described g I) as (? & ? & ? & ? & ? & ? & ? & ?).
      assert (forall k, In k (members g) -> 0 <= u k <= largest g).
      { intros k J. split; [|auto]. apply used. unfold keys. eauto using member. }
      rewrite <- norm_squared. apply Rmult_le_compat; try apply norm_nonneg; now apply moved_bound.
    + eapply Rle_trans; [now apply norm_le_total | easy].
Qed.

(* A sink, with value 0: the weight used and the real one. *)
Variables sink real_sink : R.
Hypothesis sink_used : 0 <= sink.
Hypothesis sink_rounding : Rabs (real_sink - sink) <= (exp rho - 1) * sink.
Let U := total keys u + sink.
Let Z := total keys w + real_sink.
Variables Z_low Z_high : R.
Hypothesis some_used : 0 < U.
Hypothesis sums : 0 < Z_low <= Z /\ Z <= Z_high.

(* Values, what codes lose of those that are averaged by codes, and both outputs. *)
Variables value loss : key -> entry -> R.
Variable by_codes : key -> bool.
Variable centre : entry -> R.
Definition lost_values (j : entry) := combined keys (part by_codes u) loss j.
Definition output (j : entry) := (combined keys u value j - lost_values j) / U.
Definition real_output (j : entry) := combined keys w value j / Z.

Let from_centre k j := value k j - centre j.

(* The identity of the page. *)
Lemma output_identity j :
  Z * (real_output j - output j)
  = combined keys (fun k => w k - u k) from_centre j - (real_sink - sink) * centre j
    + (U - Z) * (output j - centre j) + lost_values j.
Proof.
  assert (A : combined keys (fun k => w k - u k) from_centre j
              = combined keys w value j - combined keys u value j - centre j * (total keys w - total keys u)).
  { unfold combined, from_centre. rewrite <- total_minus, <- total_minus, <- total_times, <- total_minus.
    apply total_ext. intros. ring. }
  rewrite A. unfold real_output. fold w.
  assert (B : combined keys u value j = U * output j + lost_values j) by (unfold output; field; lra).
  rewrite B. unfold U, Z. field. fold Z. lra.
Qed.

Let length := length_of entries.

Lemma length_plus a b : length (fun j => a j + b j) <= length a + length b.
Proof. apply norm_plus. Qed.

Lemma length_times c a : length (fun j => c * a j) = Rabs c * length a.
Proof.
  unfold length, length_of. rewrite <- norm_times by apply Rabs_pos. unfold norm. f_equal.
  apply total_ext. intros.
  replace (Rabs c * a k * (Rabs c * a k)) with (Rabs c * Rabs c * (a k * a k)) by ring.
  rewrite <- Rabs_mult, Rabs_pos_eq by apply square_nonneg. ring.
Qed.

(* spread is the largest eigenvalue of the sum of outer products of values about the centre; codes bounds what codes lose. *)
Theorem output_by_sums spread codes : 0 <= spread ->
  (forall y, total keys (fun k => dot entries (from_centre k) y * dot entries (from_centre k) y) <= spread * dot entries y y) ->
  length lost_values <= codes ->
  Z_low * length (fun j => real_output j - output j)
  <= sqrt spread * (exp rho * N + (exp rho - 1) * norm keys u + F)
     + (exp rho - 1) * sink * length centre
     + Rmax (Z_high - U) (U - Z_low) * length (fun j => output j - centre j)
     + codes.
Proof.
  intros S0 S C.
  assert (L : forall a, 0 <= length a) by (intros; apply norm_nonneg).
  apply Rle_trans with (Z * length (fun j => real_output j - output j)); [apply Rmult_le_compat_r; [apply L | lra]|].
  rewrite <- (Rabs_pos_eq Z) by lra. rewrite <- length_times.
  assert (E : length (fun j => Z * (real_output j - output j))
              = length (fun j => ((combined keys (fun k => w k - u k) from_centre j + (- (real_sink - sink)) * centre j)
                                  + (U - Z) * (output j - centre j)) + lost_values j)).
  { unfold length, length_of, norm. f_equal. apply total_ext. intros j _. rewrite output_identity. ring. }
  rewrite E. repeat (eapply Rle_trans; [apply length_plus|]; apply Rplus_le_compat).
  - eapply Rle_trans; [exact (eigenvalue_bound keys entries (fun k => w k - u k) from_centre spread S0 S)|].
    apply Rmult_le_compat_l; [apply sqrt_pos | apply changes_length].
  - rewrite length_times, Rabs_Ropp. now apply Rmult_le_compat_r.
  - rewrite length_times. apply Rmult_le_compat_r; [apply L|].
    apply Rabs_le. pose proof (Rmax_l (Z_high - U) (U - Z_low)). pose proof (Rmax_r (Z_high - U) (U - Z_low)). lra.
  - exact C.
Qed.

(* The loss of codes: by the largest eigenvalue of the sum of its outer products, or by the longest. *)
Theorem lost_bound eigenvalue longest : 0 <= eigenvalue -> 0 <= longest ->
  (forall y, total keys (fun k => dot entries (loss k) y * dot entries (loss k) y) <= eigenvalue * dot entries y y) ->
  (forall k, In k keys -> length (loss k) <= longest) ->
  length lost_values
  <= Rmin (norm keys (part by_codes u) * sqrt eigenvalue) (total keys (part by_codes u) * longest).
Proof.
  intros E0 L0 E L. apply Rmin_glb.
  - rewrite Rmult_comm. now apply eigenvalue_bound.
  - eapply Rle_trans; [now apply (longest_bound keys entries _ _ longest)|].
    apply Req_le. f_equal. apply total_ext. intros k I. apply Rabs_pos_eq. unfold part.
    specialize (used k I). destruct (by_codes k); [easy | lra].
Qed.
End Output.

(* By a ball around the values, and the total variation distance; a sink is a key of value 0. *)
Theorem output_by_ball {key entry : Type} (entries : list entry) (keys : list key) (u w : key -> R)
    (value loss : key -> entry -> R) (by_codes : key -> bool) (centre : entry -> R) radius codes :
  0 < total keys u -> 0 < total keys w -> 0 <= radius ->
  (forall k, In k keys -> length_of entries (fun j => value k j - centre j) <= radius) ->
  length_of entries (combined keys (part by_codes u) loss) <= codes ->
  length_of entries (fun j => combined keys w value j / total keys w
    - (combined keys u value j - combined keys (part by_codes u) loss j) / total keys u)
  <= 2 * radius * distance keys (share keys u) (share keys w) + codes / total keys u.
Proof.
  intros U Z R B C.
  assert (A : forall v j, 0 < total keys v -> combined keys (share keys v) value j = combined keys v value j / total keys v).
  { intros v j P. unfold combined, share, Rdiv. rewrite (Rmult_comm (total keys (fun k => v k * value k j))), <- total_times.
    apply total_ext. intros. ring. }
  assert (E : length_of entries (fun j => combined keys w value j / total keys w
      - (combined keys u value j - combined keys (part by_codes u) loss j) / total keys u)
    = length_of entries (fun j => (combined keys (share keys w) value j - combined keys (share keys u) value j)
                                  + / total keys u * combined keys (part by_codes u) loss j)).
  { unfold length_of, norm. f_equal. apply total_ext. intros j _. rewrite !A by easy. field. lra. }
  rewrite E. eapply Rle_trans; [apply norm_plus|]. apply Rplus_le_compat.
  - rewrite distance_swap. apply (ball_bound keys entries _ _ _ centre); auto. rewrite !total_share; lra.
  - rewrite norm_times by (left; now apply Rinv_0_lt_compat). rewrite Rmult_comm.
    apply Rmult_le_compat_r; [left; now apply Rinv_0_lt_compat | exact C].
Qed.
